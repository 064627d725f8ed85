# Sourced by the tools before anything else: prints the comment at the top of the tool for --help, and ends.

case ${1:-} in
-h | --help)
  sed -n '2,/^[^#]/s/^# //p' "tools/$(basename "$0")"
  exit
  ;;
esac
