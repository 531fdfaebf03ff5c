# CPU seconds of `import pipedraft` and of every --help, user and system together: bash docs/lab/help_times.sh
TIMEFORMAT='%U %S'
seconds() { { time "$@" > /dev/null 2>&1; } 2>&1 | awk '{printf "%.2f\n", $1 + $2}'; }
echo "import pipedraft: $(seconds python -c 'import pipedraft')"
for command in train "train features" eval "eval compare" "eval edge" inference "inference serve" demo serve \
  data "data regenerate" "data prompts" models doctor; do
  echo "pipedraft $command --help: $(seconds python -m pipedraft $command --help)"
done
