"""Drawn command lines: each makes a configuration or ends in an error without a traceback."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from dataclasses import fields, is_dataclass
from unittest.mock import patch

import pytest
from drawing import examples
from hypothesis import example, given
from hypothesis import strategies as st

from distcache import train as entry
from distcache.cli import compose
from distcache.cli.compose import conf_dir
from distcache.config import checks
from distcache.config.tree import Config

NUMBERS = ["0", "1", "-1", "2", "16", "0.5", "1.5", "1e308", "1e400", "inf", "-inf", "nan"]
NUMBERS += [f"{2**31}", f"{2**63 - 1}", f"{2**63}", f"{-(2**63) - 1}", f"{10**40}"]
LISTS = ["[]", "[0]", "[1]", "[8,16]", "[16,1]", "[1.5]", "[[1]]", "[null]", "[x]", "[{a:1}]"]
LISTS += [f"[{number}]" for number in NUMBERS]
MAPPINGS = ["{}", "{1:2}", "{a:{b:1}}", "{t_cat_0:null}", "{t_cat_0:5}", "{t_cat_0:nan}"]
WORDS = ["null", "true", "false", "auto", "none", "off", "many", "end", "2g", "30min", "0s"]
WORDS += ["sgd", "data", "mixed", "lfu", "dcn_v2", "criteo", "parquet", "by_curve", "float64"]
SIGNS = [
    "???",
    "'???'",
    "=",
    "a=b",
    "~",
    "@",
    "\\",
    "é",
    "",
    "'a b'",
    "a b",
    '"a,b"',
    "\n",
    "'a\nb'",
]
PATHS = ["/no/such", "/dev/null", "/tmp", ".", "x" * 300]
REFERENCES = ["${x}", "'${x}'", "${trainer.steps}", "${trainer}", "${oc.env:NO_SUCH}", "${", "'${'"]
REFERENCES += ["${oc.env:HOME}", "${now:%Y}", "${nosuch:1}", "${.}", "${..}", "${oc.decode:[}"]
FUNCTIONS = ["1,2", "1,[2", "choice(1,2)", "range(1,3)", "interval(0,1)", "glob(*)", "sort(2,1)"]
FUNCTIONS += ["int(2.5)", "int(x)", "float(1e400)", "bool(x)", "extend_list(1)", "json_str(1)"]
VALUES = st.one_of(
    *map(st.sampled_from, (NUMBERS, LISTS, MAPPINGS, WORDS, SIGNS, PATHS, REFERENCES, FUNCTIONS))
)

SECTIONS = {f.name: f.default_factory for f in fields(Config) if is_dataclass(f.default_factory)}
KEYS = [f"{name}.{f.name}" for name, section in SECTIONS.items() for f in fields(section)]
CHOICES = [
    f"{name}.{f.name}={word}"
    for name, section in SECTIONS.items()
    for f in fields(section)
    for word in f.metadata.get("choice", ())
]
FILES = [f"{file.parent.name}={file.stem}" for file in conf_dir().glob("*/*.yaml")]
STRANGE_KEYS = [*SECTIONS, "experiment", "optm", "x.y", "model@x", "data/x", "", "hydra"]
STRANGE_KEYS += ["hydra.verbose", "hydra.job.name", "hydra.searchpath", "hydra/launcher"]
FORMS = ("+{}={}", "++{}={}", "~{}", "~{}={}", "{}@x={}", "{}.x={}", "{}", "+{}.x={}", "++{}.x={}")

PLAIN = st.builds("{}={}".format, st.sampled_from(KEYS), VALUES)
STRANGE = st.builds(
    lambda form, key, value: form.format(key, value),
    st.sampled_from(("{}={}", *FORMS)),
    st.sampled_from([*KEYS, *STRANGE_KEYS]),
    VALUES,
)
OVERRIDES = st.one_of(PLAIN, PLAIN, st.sampled_from(CHOICES), st.sampled_from(FILES), STRANGE)


def end_of(words: list[str]) -> tuple[int, str]:
    """The exit code of a training command that ends where its configuration is checked, and what
    it printed."""
    printed = io.StringIO()
    with (
        patch.object(sys, "argv", ["train", *words]),
        # A drawn command line may be a sweep, whose jobs are other processes.
        patch.object(compose, "run_job", lambda *_: 0),
        patch.object(checks, "require_hybrid", lambda: None),
        patch.object(entry.rendezvous, "end_with_agent", lambda: None),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        code = entry.launch(lambda *_: 0)
    return code, printed.getvalue()


@given(st.lists(OVERRIDES, min_size=1, max_size=4))
@example(["optim.l2=${trainer}"])
@example(["store=[1.5]"])
@example(["data.dense_columns.x={a:{b:1}}"])
@examples(2000)
def test_no_override_ends_in_a_traceback(words: list[str]) -> None:
    code, printed = end_of(words)
    assert "Traceback" not in printed and "HYDRA_FULL_ERROR" not in printed
    assert code == 0 or re.search(r"^error: \S", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.table_rows=[9223372036854775808]", ["data.table_rows=", "at most 64 bits"]),
        ("model.cross_rank=${x}", ["model.cross_rank", "'x' not found"]),
        ("model.dense_arch=[[1]]", ["model.dense_arch=[[1]]: give a list of whole numbers"]),
        ("model=[null]", ["model=None: no such model: there is dcn_v2, dlrm"]),
        ("hydra.verbose={a:1}", ["error: hydra.verbose={a:1}: Hydra does not take this (Asser"]),
        ("+=1", ["error: +=1: Hydra does not take this (ValueError: Config group override must"]),
        ("~model=1", ["error: ~model=1: Hydra does not take this (", "must be a string)\n"]),
        ("trainer.seed=9223372036854775808", ["trainer.seed=9223372036854775808 is out of range"]),
    ],
)
def test_the_error_names_the_key(override: str, words: list[str]) -> None:
    code, printed = end_of(["trainer.steps=1", override])
    assert code == 1
    for text in words:
        assert text in printed
