#!/bin/sh
# rustc with coverage counters (`cargo xtask coverage`), for the workspace's crates only, as `rustc.sh` has those of libFuzzer.
executed (`cargo xtask coverage`), in our own crates only, as `rustc.sh` has those of libFuzzer.
exec "$@" -Cinstrument-coverage
