#!/bin/sh
# rustc with what libFuzzer needs: counters of coverage in the code, which the stable compiler puts there when its code generator is
# told so. Cargo starts this in rustc's place for our own crates (RUSTC_WORKSPACE_WRAPPER), so that all others are those of the tests.
exec "$@" -Copt-level=1 -Ccodegen-units=1 -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares
