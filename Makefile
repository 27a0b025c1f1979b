# `demo` and `test` do their own set-up on a Debian machine with git, make and rustup's cargo; `check` needs no more than a linker.
.PHONY: check demo test nightly

check: linker
	@cargo run --quiet --package xtask -- check

demo: linker
	@echo "demo: compiling its own tool first, about a minute on two idle processors"
	@cargo run --quiet --package xtask -- demo

# A caller that ignores SIGHUP, as nohup does, would have every towline under test ignore it too.
test: linker
	@env --default-signal=HUP cargo run --quiet --package xtask -- test

# Everything that `test` leaves out too, and the long runs.
nightly: linker
	@env --default-signal=HUP cargo run --quiet --package xtask -- nightly

# Rust needs a C linker before any code of the project can run; everything else is `cargo xtask setup`'s work.
.PHONY: linker
linker:
	@command -v cc >/dev/null || { \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -q && apt-get install -qy --no-install-recommends gcc libc6-dev; \
	  else echo "towline: no C linker; run: sudo apt-get install gcc libc6-dev" >&2; exit 1; fi; }
