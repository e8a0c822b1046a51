from __future__ import annotations

import ast

import pytest

from rlspec import render
from rlspec.errors import SpecError

EVIL = 'x"; import os; os.system("touch owned") #'


def made(tmp_path, template, **values):
    path = tmp_path / "run.py.j2"
    path.write_text(template)
    return render.text(path, values)


@pytest.mark.parametrize("value", [EVIL, "it's", "a\nb", "\\", "{{ x }}".replace("{", "("), "é\u2028", "'''", '"""'])
def test_a_value_stays_a_string(tmp_path, value):
    tree = ast.parse(made(tmp_path, "name = {{ name | py }}\n", name=value))
    assert len(tree.body) == 1 and ast.literal_eval(tree.body[0].value) == value


def test_numbers_lists_and_mappings(tmp_path):
    text = made(tmp_path, "a = {{ a | py }}\n", a={"x": [1, 2.5, None, True]})
    assert ast.literal_eval(text.partition("=")[2].strip()) == {"x": [1, 2.5, None, True]}


def test_shell(tmp_path):
    assert made(tmp_path, "echo {{ name | sh }}\n", name="a b; rm -rf /") == "echo 'a b; rm -rf /'\n"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("x = {{ name }}", "unquoted"),
        ("a\nb\nx = {{ name | upper }}", ":3:"),
        ("x = '{{ name | py }}'", "quotes around"),
        ('x = "{{ name | py }}"', "quotes around"),
        ("x = {{ nam | py }}", "nam"),
        ("x = {{ name | py", ":1:"),
        ("x = {{ name.__class__.__mro__ | py }}", "."),
        ("x = {{ settings.rate | py }}", "rate"),
        ("model = '<model-name>'", "<model-name>"),
        ("model = '<MODEL>'", "<MODEL>"),
    ],
)
def test_refused(tmp_path, template, words):
    with pytest.raises(SpecError, match=words.replace(".", r"\.")):
        made(tmp_path, template, name="x", settings={})


def test_a_loop_cannot_smuggle_an_unquoted_value(tmp_path):
    with pytest.raises(SpecError, match="unquoted"):
        made(tmp_path, "{% for x in names %}{{ x }}{% endfor %}", names=["a"])
