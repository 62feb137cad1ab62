"""``gspo completion SHELL``: a script, made from the parser itself, that completes commands, options and files."""

import argparse
from collections.abc import Iterator
from typing import Final

SHELLS: Final = ("bash", "zsh", "fish")
WITH_OPTIONS_ELSEWHERE: Final = {
    "broker": ("--set", "--name"),
    "learner": ("--set", "--name"),
    "rollout": ("--set", "--name"),
    "eval": (
        "--set",
        "--model",
        "--checkpoint",
        "--only",
        "--tasks",
        "--samples",
        "--metrics",
        "--temperature",
        "--top-p",
        "--top-k",
        "--max-turn-tokens",
        "--max-tokens",
        "--out",
    ),
    "replay": ("--set",),
    "serve": ("--set", "--name"),
    "track": ("--to", "--follow", "--set"),
}
"""Commands that parse their own arguments."""

_BASH: Final = """\
_gspo() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands} --help --version"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
        esac
    fi
    case "$current" in
        -*) COMPREPLY=($(compgen -W "$words --help" -- "$current")) ;;
        *) if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "$words" -- "$current")); else COMPREPLY=(); fi ;;
    esac
}}
complete -o default -F _gspo gspo
"""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for one of SHELLS. bash: ``eval "$(gspo completion bash)"`` in ~/.bashrc; the others likewise."""
    commands = dict(_commands(parser))
    if shell == "fish":
        return "\n".join(_fish(commands)) + "\n"
    cases = "\n".join(
        f'            {name}) words="{" ".join(options)}" ;;' for name, (_, options) in commands.items() if options
    )
    bash = _BASH.format(commands=" ".join(commands), cases=cases)
    return bash if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{bash}"


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, tuple[str, list[str]]]]:
    """Yield the name of each command, its help and its options."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, command in action.choices.items():
            options = [option for each in command._actions for option in each.option_strings if option.startswith("--")]
            own = [option for option in options if option != "--help"] or list(WITH_OPTIONS_ELSEWHERE.get(name, ()))
            yield name, (helps.get(name, ""), own)


def _fish(commands: dict[str, tuple[str, list[str]]]) -> Iterator[str]:
    for name, (text, options) in commands.items():
        quoted = text.replace("\\", "\\\\").replace("'", "\\'")
        yield f"complete -c gspo -f -n __fish_use_subcommand -a {name} -d '{quoted}'"
        for option in options:
            yield f"complete -c gspo -n '__fish_seen_subcommand_from {name}' -l {option.removeprefix('--')}"
