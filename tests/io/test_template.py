from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_batch.errors import ConfigError, RowError
from echo_batch.io.template import PromptTemplate, expand_template


def render(template: str, **values: object) -> str:
    return PromptTemplate.parse(template).render(values)


def test_columns_braces_and_escapes() -> None:
    template = r"{context}\n\n{{literal}} \{x\} \t\\n \x41\u00e9\"{input}"
    assert render(template, context="C", input="I") == 'C\n\n{literal} {x} \t\\n Aé"I'
    assert render("{{{a}}}", a="1") == "{1}"
    assert render("{a}{a}", a="1") == "11"
    assert PromptTemplate.parse("{b}{a}").columns == ("b", "a")


def test_values_are_not_parsed_again() -> None:
    assert render("{a}", a=r"{b}\n{{") == r"{b}\n{{"


def test_values_that_are_no_text() -> None:
    assert render("{a}|{b}|{c}|{d}", a=1, b=2.5, c=["é", None], d={"k": True}) == '1|2.5|["é", null]|{"k": true}'
    assert render("{a}", a=b"caf\xc3\xa9\xff") == "café�"


@pytest.mark.parametrize("value", [None, float("nan"), ...])
def test_missing_value_fails_the_row(value: object) -> None:
    values = {} if value is ... else {"b": value}
    with pytest.raises(RowError, match="column 'b'") as error:
        PromptTemplate.parse("{a}{b}").render({"a": "x", **values})
    assert error.value.code == "no_prompt"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{a", "single '{'"),
        ("a} {b}", "single '}'"),
        ("{}", "empty {}"),
        ("{a.b}", "no attributes"),
        ("{a[0]}", "no attributes"),
        ("{a!r}", "no attributes"),
        ("{a:>5}", "no attributes"),
        ("{a.__class__}", "no attributes"),
        (r"{a}\q", r"unknown escape \\q"),
        ("{a}\\", "unknown escape"),
        (r"{a}\ud800", "half a character"),
        ("no column", "names no"),
        ("", "names no"),
        ("@no-such-file", "no-such-file"),
    ],
)
def test_bad_templates(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptTemplate.parse(template)


def test_from_file(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_text("Read:\n{a}\\n{b}\n")
    assert render(f"@{file}", a="1", b="2") == "Read:\n1\n2"
    file.write_text("@{a}\r\n")
    assert expand_template(expand_template(f"@{file}")) == expand_template(f"@{file}") == "\\x40{a}"
    assert render(f"@{file}", a="1") == "@1"
    file.write_bytes(b"\xff{a}")
    for path in (file, "~nobody-of-that-name/t.txt"):
        with pytest.raises(ConfigError):
            PromptTemplate.parse(f"@{path}")


names = st.text(st.characters(blacklist_characters="{}.[]!:\\", blacklist_categories=["Cs"]), min_size=1, max_size=8)
literals = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("{", "{{").replace("}", "}}")


@given(st.lists(st.tuples(literals, names), min_size=1, max_size=5), literals, st.data())
def test_round_trip(parts: list[tuple[str, str]], last: str, data: st.DataObject) -> None:
    source = "".join(f"{escaped(text)}{{{name}}}" for text, name in parts) + escaped(last)
    if source.startswith("@"):
        source = "\\x40" + source[1:]
    template = PromptTemplate.parse(source)
    assert template.columns == tuple(name for _, name in parts)
    assert template.texts == (*(text for text, _ in parts), last)
    values = {name: data.draw(st.text(max_size=5)) for _, name in parts}
    assert template.render(values) == "".join(text + values[name] for text, name in parts) + last


@given(st.text(st.sampled_from("{}\\nab.@"), max_size=12))
def test_any_text_is_a_template_or_a_config_error(text: str) -> None:
    try:
        template = PromptTemplate.parse(text)
    except ConfigError:
        return
    assert template.columns and len(template.texts) == len(template.columns) + 1
