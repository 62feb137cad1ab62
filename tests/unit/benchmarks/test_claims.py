"""What README.md and the study's page claim is what the kept runs give by the rules of their questions."""

import re
from dataclasses import replace

from benchmarks.study.questions.grid import cells
from benchmarks.study.reporting import claims
from benchmarks.study.reporting.report import DOCUMENT, README, fill
from benchmarks.study.results import Results, load_summaries

VERDICT = re.compile(r"\*\*(?:shown|not shown|refuted|not refuted|open|yes)\.?\*\*", re.IGNORECASE)
GENERATED = re.compile(r"<!-- table: [\w-]+ -->.*?<!-- end -->", re.DOTALL)


def test_neither_page_says_a_verdict_beside_the_tables_that_the_results_write() -> None:
    for page in (README, DOCUMENT):
        assert VERDICT.findall(GENERATED.sub("", page.read_text())) == [], page.name
        assert VERDICT.findall(page.read_text()), "the tables have them"
    beside = GENERATED.sub("", README.read_text())
    assert re.findall(r"study\.md(#[\w-]+)?", beside) == ["#verdicts"], "the README states results through its table alone"


def test_every_question_with_a_rule_has_its_claims_and_each_verdict_is_what_the_kept_runs_say() -> None:
    results = Results(load_summaries())
    found = [(claim.question, claim.decide(results).verdict) for claim in claims.claims()]
    by_question = {name: [verdict for question, verdict in found if question == name] for name, _ in found}
    assert by_question["f"] == ["shown", "not shown", "not shown"]
    assert by_question["g"] == ["open", "open", "shown", "shown", "refuted"]
    assert by_question["i"] == ["shown", "not shown"]
    assert by_question["j"] == ["shown", "shown", "open", "refuted"]
    assert by_question["k"] == ["not refuted", "shown", "shown", "not refuted", "open", "shown"]
    assert by_question["l"] == ["shown"]
    assert by_question["m"] == ["open"] * 3, "there are no runs yet: give the verdicts, and the page its section"


def test_a_claim_follows_its_runs() -> None:
    """A calibrated range that learned less as shipped would not be the right default, and the page would differ."""
    kept = load_summaries()
    worse = {
        cell.config.run_id: replace(
            kept[cell.config.run_id], evals=[(batch, 0.1) for batch, _ in kept[cell.config.run_id].evals]
        )
        for cell in cells()
        if (cell.question, cell.row, cell.column) == ("i", "calibrated", "shipped")
    }
    results = Results(kept | worse)
    (claim,) = (each for each in claims.claims() if each.text.startswith("The calibrated range is the right default"))
    assert claim.decide(Results(kept)).verdict == "shown"
    assert claim.decide(results).verdict == "refuted"
    made = {"claims-in-short": lambda: claims.short_table(results)}
    assert fill(README.read_text(), made) != README.read_text()
