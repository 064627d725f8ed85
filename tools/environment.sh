# Sourced by the tools: makes .venv in the checkout, or reuses it while pyproject.toml and the constraints are what they were.
# Sets VENV. Needs Python 3.11 or newer and nothing else.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${RLCTL_VENV:-$ROOT/.venv}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13 python; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "rlctl needs Python 3.11 or newer; set PYTHON to one." >&2
  return 1
}

make_environment() {
  local constraints=() wanted have python
  # A machine with a GPU takes the registry's CUDA build.
  command -v nvidia-smi >/dev/null 2>&1 || constraints=(-c "$ROOT/tools/constraints-cpu.txt")
  wanted=$(cat "$ROOT/pyproject.toml" "$ROOT/tools/constraints-cpu.txt" "$ROOT/tools/environment.sh" | cksum)
  have=$(cat "$VENV/.rlctl-environment" 2>/dev/null || true)
  [ "$wanted" = "$have" ] && return
  python=$(find_python)
  echo "Making ${VENV#"$ROOT"/} (a minute or two, once) ..." >&2
  [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
  "$VENV/bin/python" -m pip install --quiet "${constraints[@]}" -e "$ROOT[dev]"
  echo "$wanted" >"$VENV/.rlctl-environment"
}

make_environment
