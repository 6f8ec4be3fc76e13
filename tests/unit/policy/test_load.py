"""YAML with positions: what is refused, where, and that no secret is repeated."""

from __future__ import annotations

import pytest

from gateway.errors import PolicyError
from gateway.policy.load import load_texts
from gateway.policy.models import Agent, AgentKey, Fleet, Provider, ProviderKey, Server, Webhooks
from gateway.policy.tree import MAX_DEPTH, SECRETS
from gateway.snapshot import Secret
from tests.unit.policy.sample import ENV, SMALL, load, problems, said


def test_a_small_policy_holds():
    assert not problems(SMALL)


def test_every_error_is_reported_at_once_with_file_line_and_column():
    text = SMALL.replace("kind: other", "kind: othr").replace("pool: per_model", "pol: per_model")
    found = problems(text)
    assert [(p.file, p.line, p.column, p.path) for p in found] == [
        ("1.yaml", 4, 11, "providers.up.kind"),
        ("1.yaml", 8, 3, "models.m-*.pool"),
        ("1.yaml", 8, 23, "models.m-*.pol"),
    ]
    assert found[0].nearest == "other"
    assert found[2].nearest == "pool"


def test_a_duplicate_key_is_refused_and_names_the_first():
    assert "twice, first in line 1" in said(SMALL + "version: 1\n")


def test_a_duplicate_key_in_a_nested_flow_mapping_is_refused():
    text = SMALL.replace("{provider: up, ", "{provider: up, provider: up, ")
    assert "models.m-*.provider: the key stands here twice" in said(text)


@pytest.mark.parametrize("word", ["no", "NO", "yes", "on", "Off", "off", "y", "N"])
def test_a_word_that_some_readers_take_for_a_boolean_is_refused_where_text_is_meant(word):
    text = SMALL.replace("provider: up,", f"provider: up, upstream: {word},")
    assert "is a boolean to some readers" in said(text)
    assert not problems(text.replace(f"upstream: {word}", f"upstream: '{word}'"))


def test_a_boolean_word_as_a_key_is_refused():
    assert "'no' is a boolean to some readers" in said(SMALL + "prices: {no: {input: 1}}\n")


@pytest.mark.parametrize("word", ["yes", "on", "1", "'true'"])
def test_a_switch_takes_true_or_false_only(word):
    assert problems(SMALL + f"logging: {{access: {word}}}\n")


def test_off_is_a_mode():
    assert load(SMALL + "loops: {mode: off}\n").rules.loops.mode == "off"


@pytest.mark.parametrize("number", ["010", "0x10", "1:30", "0b1", ".inf", "1e3", ".5", "+.5", "5."])
def test_a_number_that_readers_take_differently_is_refused(number):
    text = SMALL.replace("provider: up,", f"provider: up, max_output: {number},")
    assert "readers of YAML take differently" in said(text)


def test_a_key_without_value_is_refused():
    assert "prices: has no value" in said(SMALL + "prices:\n")


@pytest.mark.parametrize(
    "line",
    [
        "edge: !!python/object/apply:os.system ['true']",
        "edge: !mine {}",
        "edge: {drain: !!int 5}",
        "tokenizer: !!binary cmVxdWlyZWQ=",
    ],
)
def test_explicit_tags_are_refused(line):
    assert "an explicit tag is not allowed" in said(SMALL + line + "\n")


def test_aliases_and_merge_keys_are_followed_and_own_keys_win():
    text = SMALL.replace(
        "  m-*: {provider: up, pool: per_model}\n",
        "  m-1: &one {provider: up, pool: per_model, max_output: 5}\n"
        "  m-2: {<<: *one, max_output: 7}\n"
        "  m-3: *one\n",
    )
    models = load(text).rules.models
    assert [models[name].max_output for name in ("m-1", "m-2", "m-3")] == [5, 7, 5]


@pytest.mark.slow
def test_an_alias_bomb_is_refused():
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
    )
    assert "stands for more than" in said(bomb)


@pytest.mark.slow
def test_a_merge_bomb_is_refused():
    bomb = "a0: &a0 {" + ", ".join(f"k{n}: 1" for n in range(100)) + "}\n"
    bomb += "b: {<<: [" + ", ".join(["*a0"] * 2000) + "]}\n"
    assert problems(bomb)


def test_a_node_that_contains_itself_is_refused():
    assert "an alias without an anchor before it" in said("a: &a [*a]\n")


def test_deep_nesting_is_refused():
    assert "nested deeper" in said("a: " + "[" * 500 + "]" * 500)
    assert "nesting" in said("a: " + "[" * 50_000)
    assert "nested deeper" in said("a: " + "{b: " * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1))


def test_a_second_document_is_refused():
    assert "a second document" in said(SMALL + "---\n" + SMALL)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n", "text\n", "~\n"])
def test_a_file_without_a_mapping_is_refused(text):
    assert "holds no mapping" in said(text)


def test_what_is_not_yaml_is_told_with_its_place():
    (problem,) = problems("version: 1\nmodels: {a: [1, 2\nagents: {}\n")
    assert problem.line == 4 or problem.line == 3
    assert "not YAML" in problem.what


def test_a_tab_a_null_byte_and_bad_utf8_are_told_with_their_line():
    assert problems("version: 1\nedge:\n\tdrain: 5s\n")[0].line == 3
    assert problems("version: 1\nedge: \x00\n")[0].line == 2
    with pytest.raises(PolicyError) as wrong:
        load_texts({"f.yaml": b"version: 1\n\xff\n"}, env={})
    assert (wrong.value.problems[0].line, wrong.value.problems[0].what) == (
        2,
        "the file is not UTF-8",
    )


def test_a_byte_order_mark_is_harmless():
    assert load("\ufeff" + SMALL).rules.version == 1


# --- several files ---


def test_files_are_merged_section_by_section():
    more = "version: 1\nagents:\n  two: {keys: [{pattern: soak-*}]}\n"
    assert list(load(SMALL, more).rules.agents) == ["dev", "two"]


def test_an_entry_in_two_files_is_refused():
    more = 'agents:\n  dev: {keys: [{key: "${UP_KEY}"}]}\n'
    (problem,) = problems(SMALL, more)
    assert (problem.file, problem.line, problem.what) == ("2.yaml", 2, "stands in two files")


def test_a_single_value_in_two_files_is_refused():
    assert "tokenizer: stands in two files" in said(
        SMALL + "tokenizer: preferred\n", "tokenizer: required\n"
    )


def test_an_empty_file_beside_others_is_harmless():
    assert load(SMALL, "# later\n").files == ("1.yaml", "2.yaml")


# --- secrets ---


def test_references_resolve_in_secrets_and_in_base_urls_only():
    policy = load(SMALL.replace("http://127.0.0.1:9", "${URL}"))
    assert policy.rules.providers["up"].base_url == ENV["URL"]
    assert policy.rules.providers["up"].keys[0].value == Secret(ENV["UP_KEY"])
    assert "${…} is allowed in secrets only" in said(SMALL + "edge: {anonymous: '${DEV_KEY}'}\n")


def test_a_missing_variable_is_named_and_nothing_else_of_the_environment():
    env = {"DEV_KEY": ENV["DEV_KEY"]}
    (problem,) = problems(SMALL, env=env)
    assert problem.what == "the environment variable UP_KEY is not set"
    assert problem.line == 6
    assert "secret" not in str(problem)


def test_an_empty_variable_is_no_secret():
    assert "UP_KEY is empty" in str(problems(SMALL, env={**ENV, "UP_KEY": ""})[0])


@pytest.mark.parametrize("text", ["${UP_KEY", "${}", "${sk-live-1234}", "${file:relative}", "a${"])
def test_a_broken_reference_is_refused_without_repeating_it(text):
    found = said(SMALL.replace("${UP_KEY}", text))
    assert found
    assert "sk-live" not in found


def test_a_secret_may_be_part_of_a_text():
    text = SMALL.replace('"${UP_KEY}"', '"Key ${UP_KEY}!"')
    assert load(text).rules.providers["up"].keys[0].value.reveal() == f"Key {ENV['UP_KEY']}!"


def test_a_secret_with_a_line_break_cannot_split_a_header():
    found = problems(SMALL, env={**ENV, "UP_KEY": "a\r\nx-admin: 1"})
    assert "control characters" in found[0].what


def test_secret_files_are_read_and_their_faults_told_by_path():
    text = SMALL.replace("${UP_KEY}", "${file:/run/secrets/up}")

    def read(name: str) -> str:
        assert name == "/run/secrets/up"
        return "from-file"

    policy = load_texts({"p.yaml": text.encode()}, env=ENV, read_secret=read)
    assert policy.rules.providers["up"].keys[0].value.reveal() == "from-file"
    assert [str(path) for path in policy.watched] == ["p.yaml", "/run/secrets/up"]

    def absent(_: str) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    with pytest.raises(PolicyError, match="/run/secrets/up cannot be read: No such file"):
        load_texts({"p.yaml": text.encode()}, env=ENV, read_secret=absent)


def test_no_repr_of_a_policy_shows_a_secret():
    text = repr(load(SMALL)) + str(load(SMALL))
    assert "secret" not in text.replace("read_secret", "")


@pytest.mark.parametrize(
    "edit",
    [
        ('keys: [{id: main, value: "${UP_KEY}"}]', "keys: sk-live-1234"),
        ('keys: [{id: main, value: "${UP_KEY}"}]', "keys: [sk-live-1234]"),
        ('keys: [{id: main, value: "${UP_KEY}"}]', "keys: {sk-live-1234: {}}"),
        ('keys: [{id: main, value: "${UP_KEY}"}]', "keys: [{id: 'sk live-1234', value: x}]"),
        ('keys: [{id: main, value: "${UP_KEY}"}]', "keys: [{id: a, value: [sk-live-1234]}]"),
        ('keys: [{id: main, value: "${UP_KEY}"}]', "keys: [{id: a, value: {a: sk-live-1234}}]"),
        (
            'keys: [{id: main, value: "${UP_KEY}"}]',
            "keys: [{id: a, value: x, header: sk-live-1234}]",
        ),
        ('keys: [{id: main, value: "${UP_KEY}"}]', "api_key: sk-live-1234"),
        ('keys: [{id: main, value: "${UP_KEY}"}]', "query: [sk-live-1234]"),
        ("base_url: http://127.0.0.1:9", "base_url: https://u:sk-live-1234@h"),
        ("base_url: http://127.0.0.1:9", "base_url: https://h/?key=sk-live-1234"),
        ('keys: [{key: "${DEV_KEY}"}]', "keys: [{hash: sk-live-1234}]"),
        ('keys: [{key: "${DEV_KEY}"}]', "keys: [{pattern: '[sk-live-1234]'}]"),
        ('keys: [{key: "${DEV_KEY}"}]', "keys: [{id: 'sk-live-1234!', key: a}]"),
    ],
)
def test_a_secret_in_the_wrong_place_is_never_repeated(edit):
    found = said(SMALL.replace(*edit))
    assert found
    assert "1234" not in found


def test_every_secret_field_of_the_models_is_a_secret_place_of_the_reader():
    fields = {
        (model.__name__, name)
        for model in (Agent, AgentKey, Fleet, Provider, ProviderKey, Server, Webhooks)
        for name, field in model.model_fields.items()
        if "Secret" in repr(field.annotation)
    }
    assert fields == {
        ("ProviderKey", "value"),
        ("Provider", "query"),
        ("Provider", "extra_headers"),
        ("AgentKey", "key"),
        ("Webhooks", "signing_key"),
        ("Fleet", "redis"),
        ("Server", "key"),
        ("Server", "headers"),
        ("Server", "env"),
    }
    assert len(SECRETS) == len(fields)


def test_a_plain_secret_is_warned_of_unless_the_server_is_on_this_machine():
    plain = SMALL.replace("${UP_KEY}", "sk-live-1234")
    assert not load(plain).warnings
    warnings = load(plain.replace("127.0.0.1:9", "api.example")).warnings
    assert [str(w) for w in warnings] == [
        "1.yaml:6:23: providers.up.keys[0].value: a secret in plain text; "
        "allowed: ${NAME} or ${file:/path}"
    ]


def test_the_digest_is_of_the_content_and_the_fingerprint_also_of_the_secrets():
    one, two = load(SMALL), load(SMALL, env={**ENV, "UP_KEY": "rotated"})
    assert one.digest == two.digest
    assert one.fingerprint != two.fingerprint
    assert load(SMALL + "# more\n").digest != one.digest


def test_places_lead_from_rule_ids_to_lines():
    places = load(SMALL).places
    assert places["models.m-*.pool"].line == 8
    assert places["agents.dev.keys[0].key"].line == 11


def test_garbage_is_reported_up_to_a_bound():
    text = SMALL + "".join(f"k{n}: 1\n" for n in range(1000))
    assert len(problems(text)) == 200


@pytest.mark.parametrize("text", ["<<: 5", "<<: [5]", "<<: [[]]"])
def test_a_merge_takes_mappings_only(text):
    assert "<< takes a mapping" in said(f"edge: {{{text}}}\n" + SMALL)


@pytest.mark.parametrize(
    "key", ["{a: b}", "[a]", "~", "true", '""', "x" * 201, '"a\\tb"', "!!str a"]
)
def test_a_key_that_is_no_name_is_refused(key):
    assert "a key must be a" in said(SMALL + f"edge: {{? {key} : 1}}\n")


def test_control_characters_are_refused_in_values():
    assert "holds a control character" in said(SMALL + 'edge: {anonymous: "a\\eb"}\n')


def test_an_unsound_key_in_a_merged_mapping_is_refused_there_too():
    assert "'no' is a boolean" in said(SMALL + "edge: {<<: {no: 1}}\n")


def test_aliases_cannot_nest_deeper_than_the_file_may():
    chain = "a: &a0 {x: 1}\n" + "".join(
        f"b{n}: &a{n} {{x: {{x: {{x: *a{n - 1}}}}}}}\n" for n in range(1, 12)
    )
    assert "nested deeper" in said(chain)


def test_a_misspelled_section_is_one_mistake_and_not_one_for_each_secret_in_it():
    text = SMALL.replace("agents:", "agnets:")
    assert "${" in text
    found = problems(text)
    assert [problem.path for problem in found if problem.path != "agents"] == ["agnets"]


@pytest.mark.parametrize("edit", [("\n  ", "\n\t"), ("rpm: 5", "\trpm: 5")])
def test_a_tab_is_called_a_tab(edit):
    text = "version: 1\npools:\n  p:\n    limits:\n      rpm: 5\n".replace(*edit, 1)
    (problem,) = problems(text)
    assert problem.what == "not YAML: a tab"
    assert "spaces" in problem.allowed


def test_a_line_indented_wrongly_says_what_to_look_at():
    (problem,) = problems("version: 1\npools:\n  p: {}\n q: {}\n")
    assert problem.line == 4
    assert "equally far to the right" in problem.allowed
