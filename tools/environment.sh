# Sourced by the tools: makes .venv in the checkout, or reuses it while pyproject.toml and the constraints are what they were.
# Sets VENV. Needs Python 3.11 or newer and nothing else.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${RLCTL_VENV:-$ROOT/.venv}

source "$ROOT/tools/python.sh"

make_environment() {
  local constraints=() wanted have python
  # A machine with a GPU takes the registry's CUDA build.
  has_gpu || constraints=(-c "$ROOT/tools/constraints-cpu.txt")
  wanted=$(cat "$ROOT/pyproject.toml" "$ROOT/tools/constraints-cpu.txt" "$ROOT/tools/environment.sh" "$ROOT/tools/python.sh" | cksum)
  have=$(cat "$VENV/.rlctl-environment" 2>/dev/null || true)
  [ "$wanted" = "$have" ] && return
  python=$(find_python)
  echo "Making ${VENV#"$ROOT"/} (a minute or two, once) ..." >&2
  [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
  "$VENV/bin/python" -m pip install --quiet "${constraints[@]}" -e "$ROOT[dev]"
  echo "$wanted" >"$VENV/.rlctl-environment"
}

make_environment
