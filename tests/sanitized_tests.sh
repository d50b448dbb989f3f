#!/usr/bin/env bash
# Runs the unit, protocol and transport tests of a sanitizer build; 77 (skipped) if it is not built.
# Usage: sanitized_tests.sh BUILD_FOLDER
set -euo pipefail
if [[ ! -f $1/CTestTestfile.cmake ]]; then
  echo "There is no build in ($1); scripts/test makes it."
  exit 77
fi
export TSAN_OPTIONS="suppressions=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/tsan_suppressions.txt"
exec ctest --test-dir "$1" -L 'unit|protocol|transport' --output-on-failure --no-tests=error \
  -j "$(nproc)"
