#!/bin/sh
# Runs install.py with a Python of 3.11 to 3.13 that can make virtual environments, or says how to get one.
#
#   sh requirements/setup/setup.sh WHAT...     with PYTHON=/path/to/python3.13 for that one and no other
#
# The environment's own Python comes first, then python3, then the others on PATH, pyenv's and uv's.

can_run() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

has_venv() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null
}

candidates() {
    if [ -n "$PYTHON" ]; then
        command -v "$PYTHON"
        return
    fi
    [ -x .venv/bin/python ] && echo .venv/bin/python
    for name in python3 python3.13 python3.12 python3.11 python; do
        command -v "$name"
    done
    for found in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[123].*/bin/python3; do
        [ -x "$found" ] && echo "$found"
    done
    command -v uv >/dev/null && uv python find --no-project --no-python-downloads '>=3.11,<3.14' 2>/dev/null
}

no_python() {
    echo "setup: no Python of 3.11 to 3.13 is here. Seen: ${seen:-none}. Any of these brings one:"
    command -v uv >/dev/null && echo "  uv python install 3.13"
    system=$(. /etc/os-release 2>/dev/null && echo "$ID $ID_LIKE")
    case " $system " in
    *" debian "* | *" ubuntu "*)
        for version in 3.13 3.12 3.11; do
            apt-cache show "python$version-venv" >/dev/null 2>&1 && break
        done
        echo "  sudo apt-get install python$version python$version-venv"
        ;;
    *" fedora "* | *" rhel "*) echo "  sudo dnf install python3.12" ;;
    *" suse "* | *" opensuse "*) echo "  sudo zypper install python313" ;;
    esac
    command -v uv >/dev/null || echo "  uv (https://docs.astral.sh/uv), then: uv python install 3.13"
    echo "  another place: make PYTHON=/path/to/python3.13"
}

no_venv() {
    version=$("$incomplete" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "setup: $incomplete (Python $version) cannot make virtual environments: it has no venv or ensurepip module."
    echo "  Debian, Ubuntu: sudo apt-get install python$version-venv"
    echo "  another Python: make PYTHON=/path/to/python3.13"
}

seen=
incomplete=
# A path may hold spaces: one candidate a line.
while IFS= read -r candidate; do
    [ -n "$candidate" ] || continue
    if ! can_run "$candidate"; then
        seen="$seen${seen:+, }$candidate ($("$candidate" -V 2>&1 | head -n 1 | cut -c 1-60))"
    elif ! has_venv "$candidate"; then
        incomplete=${incomplete:-$candidate}
    else
        # The environment may be made anew, with the Python that it was made from.
        if [ "$candidate" = .venv/bin/python ]; then
            candidate=$("$candidate" -c 'import sys; print(sys._base_executable)')
        fi
        exec "$candidate" requirements/setup/install.py "$@"
    fi
done <<END
$(candidates)
END

if [ -n "$incomplete" ]; then no_venv; elif [ -n "$PYTHON" ] && [ -z "$seen" ]; then echo "setup: PYTHON=$PYTHON: there is no such program"; else no_python; fi >&2
exit 1
