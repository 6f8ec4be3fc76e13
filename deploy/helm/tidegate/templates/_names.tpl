{{- define "tidegate.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "tidegate.labels" -}}
app.kubernetes.io/name: tidegate
app.kubernetes.io/instance: {{ include "tidegate.name" . }}
{{- end -}}

{{- define "tidegate.store" -}}
app.kubernetes.io/name: tidegate-valkey
app.kubernetes.io/instance: {{ include "tidegate.name" . }}
{{- end -}}
