// The C SDK: one import. Zig: `const t = @cImport(@cInclude("tidegate.h"));`
//
// A request is UTF-8 JSON, {"v":1,"op":"llm.chat","args":{…}}; the operations are those of the JavaScript
// prelude. The result is the reply's whole length L; min(L, capacity) bytes were written. When L is larger,
// {"v":1,"op":"reply.rest","args":{"offset":N}} reads on, in base64. -1: the request was unreadable (a
// pointer outside memory, more than 1 MiB, not JSON is an error *reply*). The call may take days: the
// module is suspended meanwhile and continues on any machine, with its stack as it was.
#ifndef TIDEGATE_H
#define TIDEGATE_H
#ifdef __cplusplus
extern "C" {
#endif
__attribute__((import_module("agent"), import_name("host_call")))
int tidegate_call(const char *request, int length, char *reply, int capacity);
#ifdef __cplusplus
}
#endif
#endif
