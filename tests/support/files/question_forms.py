"""Rows of public sets of multiple choice, of reading and of arithmetic, in their columns and in our words."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

_ABC: Final = ["Mars", "Jupiter", "Venus"]
_SHOWN: Final = "Largest?\n\nA. Mars\nB. Jupiter\nC. Venus"
_HOTPOT: Final = {"title": ["Sky", "Sea"], "sentences": [["It is blue.", " Often."], ["It is wet."]]}
Row = dict[str, Any]


class QuestionForm(NamedTuple):
    row: Row
    asked: str
    """The message that the policy is shown."""
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def _choice(
    row: Row, asked: str = _SHOWN, *, left_out: tuple[str, ...] = (), right: str = "B", text: str = "Jupiter"
) -> QuestionForm:
    said = (right, f"({right})", f"({right}) {text}", f"\\text{{{right}. {text}}}", text)
    wrong = (*("ABC".replace(right, "")), "Mars" if text != "Mars" else "Venus", f"({right}) or (C)", "D", "")
    return QuestionForm(row, asked, said, wrong, left_out)


FORMS: Final[dict[str, QuestionForm]] = {
    "MMLU": _choice({"question": "Largest?", "subject": "astronomy", "choices": _ABC, "answer": 1}),
    "MMLU in CSV": _choice({"question": "Largest?", "choices": "['Mars', 'Jupiter', 'Venus']", "answer": "1"}),
    "C-Eval": _choice(
        {"id": 0, "question": "Largest?", "A": "Mars", "B": "Jupiter", "C": "Venus", "answer": "B", "explanation": "So."},
        left_out=("explanation",),
    ),
    "MMLU-Pro": _choice(
        {"question_id": 7, "question": "Largest?", "options": _ABC, "answer": "B", "answer_index": 1, "cot_content": "So"},
        left_out=("answer", "cot_content"),
    ),
    "SuperGPQA": _choice(
        {"uuid": "u", "question": "Largest?", "options": _ABC, "answer": "Jupiter", "answer_letter": "B"},
        left_out=("answer_letter",),
    ),
    "AQuA": _choice(
        {"question": "Largest?", "options": ["A)Mars", "B)Jupiter", "C)Venus"], "rationale": "So.", "correct": "B"},
        "Largest?\n\nA)Mars\nB)Jupiter\nC)Venus",
        left_out=("rationale",),
    ),
    "MathQA": _choice(
        {"Problem": "Largest?", "options": "a ) Mars , b ) Jupiter , c ) Venus", "correct": "b", "Rationale": "So."},
        left_out=("Rationale",),
    ),
    "ARC": _choice(
        {"id": "M", "question": "Largest?", "choices": {"text": _ABC, "label": ["1", "2", "3"]}, "answerKey": "2"}
    ),
    "CommonsenseQA": _choice(
        {"id": "c", "question": "Largest?", "question_concept": "size", "choices": {"label": [*"ABC"], "text": _ABC},
         "answerKey": "B"}
    ),
    "OpenBookQA": _choice(
        {"id": "o", "question_stem": "Largest?", "choices": {"text": _ABC, "label": [*"ABC"]}, "answerKey": "B"}
    ),
    "RACE": _choice(
        {"example_id": "h", "article": "Of planets.", "question": "Largest?", "options": _ABC, "answer": "B"},
        f"Of planets.\n\n{_SHOWN}",
    ),
    "ReClor": _choice(
        {"context": "Of planets.", "question": "Largest?", "answers": _ABC, "label": 1}, f"Of planets.\n\n{_SHOWN}"
    ),
    "AGIEval": _choice({"query": "Largest?", "choices": _ABC, "gold": [1]}),
    "LogiQA": _choice({"context": "C.", "query": "Largest?", "options": _ABC, "correct_option": 1}, f"C.\n\n{_SHOWN}"),
    "MedQA": _choice(
        {"question": "Largest?", "options": dict(zip("ABC", _ABC, strict=True)), "answer": "Jupiter", "answer_idx": "B"},
        left_out=("answer",),
    ),
    "MedMCQA": _choice({"id": "m", "question": "Largest?", "opa": "Mars", "opb": "Jupiter", "opc": "Venus", "cop": 1}),
    "Social IQa": _choice(
        {"context": "C.", "question": "Largest?", "answerA": "Mars", "answerB": "Jupiter", "answerC": "Venus", "label": "2"},
        f"C.\n\n{_SHOWN}",
    ),
    "HellaSwag": _choice({"ctx": "Largest?", "ctx_a": "Larg", "endings": _ABC, "label": "1"}, left_out=("ctx_a",)),
    "WinoGrande": _choice(
        {"sentence": "Largest?", "option1": "Mars", "option2": "Jupiter", "answer": "2"}, "Largest?\n\nA. Mars\nB. Jupiter"
    ),
    "PIQA": _choice({"goal": "Largest?", "sol1": "Mars", "sol2": "Jupiter", "label": 1}, "Largest?\n\nA. Mars\nB. Jupiter"),
    "Zebra": _choice(
        {"id": "z", "puzzle": "Three planets.", "question": "Largest?", "choices": _ABC, "answer": "Jupiter"},
        f"Three planets.\n\n{_SHOWN}",
    ),
    "BoolQ": QuestionForm(
        {"question": "is it so", "passage": "It is so.", "answer": True}, "It is so.\n\nis it so",
        ("Yes", "yes", "True"), ("no", "false", "so")
    ),
    "SQuAD": QuestionForm(
        {"id": "s", "title": "T", "context": "Ada Lovelace wrote.", "question": "Who?",
         "answers": {"text": ["Ada Lovelace", "Lovelace"], "answer_start": [0, 4]}},
        "Ada Lovelace wrote.\n\nWho?",
        ("Ada Lovelace", "ada lovelace.", "Lovelace", "\\text{Ada Lovelace}"), ("Lovelace Ada", "Ada"),
    ),
    "HotpotQA": QuestionForm(
        {"id": "h", "question": "Of whom?", "answer": "Chief of Protocol", "type": "bridge", "level": "hard",
         "supporting_facts": {"title": ["Sky"], "sent_id": [0]}, "context": _HOTPOT},
        "Sky\nIt is blue. Often.\n\nSea\nIt is wet.\n\nOf whom?",
        ("Chief of Protocol", "the chief of protocol"), ("Protocol of Chief", "Chief"), ("supporting_facts",),
    ),
    "HotpotQA in JSON": QuestionForm(
        {"_id": "h", "question": "Is it?", "answer": "no", "context": [["Sky", ["It is blue."]]]},
        "Sky\nIt is blue.\n\nIs it?", ("no", "No."), ("yes", "on"),
    ),
    "MuSiQue": QuestionForm(
        {"id": "m", "question": "Who?", "paragraphs": [{"idx": 0, "title": "T", "paragraph_text": "Bob."}], "answer": "Bob"},
        "T\nBob.\n\nWho?", ("Bob",), ("Obb", "Bo"),
    ),
    "DROP": QuestionForm(
        {"passage": "P.", "question": "How many?", "answers_spans": {"spans": ["1,200"], "types": ["number"]}},
        "P.\n\nHow many?", ("1200", "1,200"), ("2100", "12,00"),
    ),
    "TriviaQA": QuestionForm(
        {"question": "Who?", "answer": {"value": "Ada", "aliases": ["Ada Lovelace"], "type": "person"}},
        "Who?", ("Ada", "Ada Lovelace"), ("Lovelace Ada", "daA"),
    ),
    "Alpaca": QuestionForm({"instruction": "Add them.", "input": "1, 2", "output": "3"},
        "Add them.\n\n1, 2", ("3", "3.0"), ("4",)),
    "Countdown": QuestionForm(
        {"target": 98, "nums": [44, 19, 35]},
        "Using the numbers [44, 19, 35], create an expression that equals 98. You can use basic arithmetic operations "
        "(+, -, *, /), and each number must be used exactly once. Put the expression within \\boxed{}.",
        ("44+19+35", "(44 + 35) + 19 = 98", "19 - (-44) + 35"),
        ("98", "44+19+35+0", "44+44+10", "44*19-35", "44+19+35=99", "x"),
    ),
    "OpenR1": QuestionForm(
        {"problem": "1+1?", "solution": "s", "answer": "2", "source": "o", "uuid": "u", "generations": ["g"],
         "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "g"}]},
        "1+1?", ("2",), ("3",), ("solution", "generations", "messages"),
    ),
    "MATH": QuestionForm(
        {"problem": "1+1?", "level": "Level 1", "type": "Algebra", "solution": "So \\boxed{2}."}, "1+1?", ("2",), ("3",)
    ),
}  # fmt: skip
MIXED: Final[dict[str, Row]] = {
    "GPQA": {"Question": "Largest?", "Correct Answer": "Jupiter",
             **{f"Incorrect Answer {number}": name for number, name in enumerate(("Mars", "Venus", "Earth"), 1)}},
    "SciQ": {"question": "Largest?", "correct_answer": "Jupiter", "distractor1": "Mars", "distractor2": "Venus",
             "distractor3": "Earth", "support": "It is Jupiter."},
    "TruthfulQA": {"question": "Largest?", "mc1_targets":
                   {"choices": ["Jupiter", "Mars", "Venus", "Earth"], "labels": [1, 0, 0, 0]}},
}  # fmt: skip
"""Rows that have the right option first: it is shown at any place."""
