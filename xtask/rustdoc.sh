#!/bin/sh
# rustdoc with its unstable outputs, of which JSON is one. Only rustdoc gets the permission: for cargo it would be another compiler,
# and all dependencies would be compiled again.
RUSTC_BOOTSTRAP=1 exec "$(rustc --print sysroot)/bin/rustdoc" "$@"
