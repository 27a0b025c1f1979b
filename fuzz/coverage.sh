#!/bin/sh
# rustc with counters of what is executed (`cargo xtask coverage`), in our own crates only, as `rustc.sh` has those of libFuzzer.
exec "$@" -Cinstrument-coverage
