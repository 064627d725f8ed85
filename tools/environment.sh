# Sourced by the tools: makes an environment in the checkout, or reuses it while the project's metadata and the constraints
# are what they were. Sets VENV. Needs Python 3.11 or newer and nothing else.
# By itself it is .venv with the extra `dev`; with RLCTL_EXTRA=dev-core, .venv-core with that one, which brings neither
# torch nor Ray. RLCTL_VENV and RLCTL_CORE_VENV name other places.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
RLCTL_EXTRA=${RLCTL_EXTRA:-dev}
case $RLCTL_EXTRA in
dev) VENV=${RLCTL_VENV:-$ROOT/.venv} ;;
dev-core) VENV=${RLCTL_CORE_VENV:-$ROOT/.venv-core} ;;
esac

source "$ROOT/tools/python.sh"

make_environment() {
  local constraints=() wanted have python
  # A machine with a GPU takes the registry's CUDA build.
  has_gpu || constraints=(-c "$ROOT/tools/constraints-cpu.txt")
  # The tables of pytest, mypy and ruff, at the end of pyproject.toml, change nothing that is installed.
  wanted=$({ sed '/^\[tool\.pytest/,$d' "$ROOT/pyproject.toml"
    cat "$ROOT/tools/constraints-cpu.txt" "$ROOT/tools/environment.sh" "$ROOT/tools/python.sh"; } | cksum)
  have=$(cat "$VENV/.rlctl-environment" 2>/dev/null || true)
  [ "$wanted" = "$have" ] && return
  python=$(find_python)
  echo "Making ${VENV#"$ROOT"/} (a minute or two, once) ..." >&2
  [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
  "$VENV/bin/python" -m pip install --quiet "${constraints[@]}" -e "$ROOT[$RLCTL_EXTRA]"
  echo "$wanted" >"$VENV/.rlctl-environment"
}

make_environment
