#!/usr/bin/env bash
# Programs that the benches compare with, below target/peers: `cargo xtask peers`. One test of the lab uses testpmd where it is
# there; nothing else needs them.
#
#   bin/vhost-device-vsock   built from crates.io
#   bin/dpdk-testpmd         Debian 12's, unpacked into dpdk/, with its libraries
#   bin/passt                Debian 13's, unpacked into passt/, with its own C library: Debian 12's has no vhost-user
#
# Cloud Hypervisor's vhost_user_net is in no registry: build it from its sources and say `--peer vhost_user_net=PATH`.
set -euo pipefail
source "$(dirname "$0")/debian.sh"
peers=$target/peers

# DPDK takes plugins from no directory that lies below one that all may write, but by name alone from the library path.
TESTPMD='#!/bin/sh
# Made by `cargo xtask peers`: Debian'\''s dpdk-testpmd, not installed.
here=$(dirname "$(readlink -f "$0")")/../dpdk/usr
lib=$here/lib/x86_64-linux-gnu
LD_LIBRARY_PATH=$lib:$lib/dpdk/pmds-23.0 exec "$here/bin/dpdk-testpmd" -d librte_net_vhost.so.23 -d librte_net_tap.so.23 \
    -d librte_net_virtio.so.23 -d librte_mempool_ring.so.23 "$@"'
# It is the program itself, not its loader, that would execute the build for AVX2.
PASST='#!/bin/sh
# Made by `cargo xtask peers`: Debian 13'\''s passt, not installed.
here=$(dirname "$(readlink -f "$0")")/../passt/usr
lib=$here/lib/x86_64-linux-gnu
program=$here/bin/passt
grep -qw avx2 /proc/cpuinfo && program=$here/bin/passt.avx2
exec "$lib/ld-linux-x86-64.so.2" --inhibit-cache --library-path "$lib" "$program" "$@"'

# wrapper NAME SCRIPT: starts an unpacked program.
wrapper() {
  printf '%s\n' "$2" >"$peers/bin/$1"
  chmod 755 "$peers/bin/$1"
}

scratch_in "$peers"
mkdir -p "$peers/bin"
if [[ ! -f $peers/bin/vhost-device-vsock ]]; then
  say "building vhost-device-vsock 0.3.0"
  "${CARGO:-cargo}" install --quiet --locked vhost-device-vsock --version 0.3.0 --root "$peers" --target-dir "$peers/build"
fi
if [[ ! -d $peers/passt ]]; then
  unpack trixie "$scratch/passt" -E . passt
  into_place "$scratch/passt" "$peers/passt"
fi
wrapper passt "$PASST"
# One without the last driver is older than this list.
if [[ ! -e $peers/dpdk/usr/lib/x86_64-linux-gnu/dpdk/pmds-23.0/librte_net_virtio.so.23 ]]; then
  rm -rf "$peers/dpdk"
  # Its libraries, and those that not every machine has.
  unpack bookworm "$scratch/dpdk" -E '^(dpdk-dev|librte-|libfdt|libjansson|libnuma|libpcap|libbsd|libibverbs|ibverbs-prov|libelf)' \
    dpdk-dev librte-net-vhost23 librte-net-tap23 librte-net-virtio23
  into_place "$scratch/dpdk" "$peers/dpdk"
fi
wrapper dpdk-testpmd "$TESTPMD"
