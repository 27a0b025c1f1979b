#!/bin/sh
# rustc with libFuzzer's coverage counters, which the stable compiler inserts with these options of its code generator. Cargo starts
# this instead of rustc for the workspace's crates only (RUSTC_WORKSPACE_WRAPPER), so all others are those of the tests.
exec "$@" -Copt-level=1 -Ccodegen-units=1 -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares
