#!/bin/sh
# rustc with coverage counters (docs/testing.md), for the workspace's crates only, as `rustc.sh` has those of libFuzzer.
exec "$@" -Cinstrument-coverage
