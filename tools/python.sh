# Sourced by what makes environments: which Python they are made with, and whether there is a GPU to install for.

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

has_gpu() {
  command -v nvidia-smi >/dev/null 2>&1
}
