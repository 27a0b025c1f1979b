#!/usr/bin/env bash
# Brings what the lab needs to a machine with Debian 12 or 13: `cargo xtask setup`.
#
#   the machine   QEMU 10.0 (bookworm-backports, or trixie) and tools: apt, as root
#   target/lab    nothing below is installed; $TOWLINE_LAB is another directory
#     qemu-7.2/         Debian 12's, with its libraries
#     qemu-stable/      QEMU 10.0 of Debian 13, with its own C library
#     qemu-newest/      QEMU 11.1 of Debian 13's backports, likewise
#     kernel/           Debian 12's cloud kernel and its modules, and `vmlinux`, what its boot/vmlinuz-* unpacks to
#     kernel-newest/    that of Debian 13's backports, 7.x
#     busybox/          busybox-static
#     openssh-server/   sshd, for guests, which have its libraries from this machine
#     cluster/          pacemaker and corosync, with what they need and this machine does not have
#     python/           websockets; python-s3/: moto, an S3 server; python-qmp/: QEMU's own qmp-shell
#     initramfs         the agent, busybox, modules; initramfs-newest: with those of kernel-newest
#     vsock-tests/      the kernel's own, for `cargo xtask soak vsock-kernel`
#
# Each part is made beside its place and renamed at the end: a part that exists is complete.
#
#   setup.sh [lab | demo | system | newer | vsock-tests]
set -euo pipefail
source "$(dirname "$0")/debian.sh"
lab=$(realpath -m "${TOWLINE_LAB:-$root/target/lab}")

# The last three: file systems without reflinks, and with them.
TOOLS="iperf3 socat iproute2 ethtool tcpdump lz4 xz-utils zstd g++ python3-venv procps openssh-client mount e2fsprogs xfsprogs btrfs-progs"
QEMU="qemu-system-x86 ipxe-qemu qemu-utils"
# Modules that guests get, with those that they need.
MODULES="virtio_pci virtio_net virtio_blk virtio_balloon virtio_mem virtio_rng vmw_vsock_virtio_transport 8021q tun"
# Commands of busybox that scripts call by name.
APPLETS="sh cat cp dd dmesg echo free grep head httpd ip kill ls md5sum mkdir nc ping ps rm sha256sum sleep tail wc wget"
# A program of another C library is started by its own loader, which finds libraries nowhere else.
WRAPPER='#!/bin/sh
# Made by `cargo xtask setup`: a QEMU of another Debian, not installed.
here=${0%/*}/usr
lib=$here/lib/x86_64-linux-gnu
export QEMU_MODULE_DIR="$lib/qemu"
exec "$lib/ld-linux-x86-64.so.2" --inhibit-cache --library-path "$lib" "$here/bin/qemu-system-x86_64" \
    -L "$here/share/qemu" -L "$here/share/seabios" "$@"'

has_qemu() { [[ $(installed qemu-system-x86) == 1:10.0* && ! $(missing $QEMU) ]]; }

# Installs QEMU 10.0 and these tools.
system() {
  require "$@"
  has_qemu && return
  local suite=trixie
  if [[ $codename == bookworm ]]; then
    suite=bookworm-backports
    if ! apt-get indextargets --format '$(RELEASE)' | grep -qx "$suite"; then
      [[ $(id -u) == 0 ]] || apt_install "$QEMU (10.0)"
      say "adding $suite to /etc/apt/sources.list.d"
      printf '%s\n' "# Written by towline's \`cargo xtask setup\` for QEMU 10.0; safe to delete." \
        "Types: deb" "Suites: $suite" "Components: main" "URIs: $(mirror)" "Signed-By: $KEYRING" \
        >/etc/apt/sources.list.d/towline-backports.sources
    fi
  fi
  apt_install -t "$suite" $QEMU
  has_qemu ||
    die "$suite brings no qemu-system-x86 10.0, apt knows $(apt-cache madison qemu-system-x86 | cut -d'|' -f2 | xargs)"
}

# bring PART COMMAND...: has the command make a part that is missing; its last argument is the tree to fill.
bring() {
  local part=$1
  shift
  [[ ! -d $lab/$part ]] || return 0
  "$@" "$scratch/$part" && into_place "$scratch/$part" "$lab/$part" && changed=yes
}

bring_required() {
  bring "$@" || die "no $1; check that this machine reaches its Debian mirror, then run \`cargo xtask setup\` again"
}
bring_optional() { bring "$@" || say "no $1: the tests that want it are skipped"; }

# kernel SUITE TREE: the tree has the shape of Debian 12's package.
kernel() {
  local modules release
  unpack "$1" "$2" -E '^linux-[a-z]+-[0-9][^_]*-cloud-amd64_' linux-image-cloud-amd64 || return
  modules=$2/lib/modules
  [[ -d $modules ]] || { mkdir -p "$2/lib" && mv "$2/usr/lib/modules" "$modules"; } || return
  release=$(basename "$modules"/*)
  [[ ! -f $modules/$release/vmlinuz ]] || { mkdir -p "$2/boot" && mv "$modules/$release/vmlinuz" "$2/boot/vmlinuz-$release"; }
  [[ -f $2/boot/vmlinuz-$release ]]
}

# one PACKAGE SUITE TREE: without what it needs.
one() { unpack "$2" "$3" -E "^$1_" "$1"; }

qemu_7_2() {
  local libraries=$1/usr/lib/x86_64-linux-gnu:$1/lib/x86_64-linux-gnu
  unpack bookworm "$1" -vE "$RUNTIME" qemu-system-x86 &&
    LD_LIBRARY_PATH=$libraries "$1/usr/bin/qemu-system-x86_64" --version | grep -F 'version 7.2' >/dev/null
}

# cluster TREE: laid over the /usr and /etc of hosts of a test, so everything belongs below these two.
cluster() {
  local files directory
  files=$(apt_get install --print-uris --no-install-recommends pacemaker corosync pacemaker-cli-utils |
    sed -nE "s/^'[^']*' ([^_]+)_.*/\1/p") || return
  say "downloading pacemaker and corosync, $(wc -w <<<"$files") packages"
  mkdir "$scratch/packages" && (cd "$scratch/packages" && apt_get download $files) || return
  for file in "$scratch"/packages/*.deb; do dpkg-deb -x "$file" "$1" || return; done
  for directory in bin lib sbin; do
    [[ ! -d $1/$directory ]] || { cp -a "$1/$directory/." "$1/usr/$directory/" && rm -r "${1:?}/$directory"; } || return
  done
  [[ -x $1/usr/sbin/pacemakerd && -x $1/usr/sbin/corosync && -x $1/usr/sbin/crm_resource ]]
}

# qemu SUITE TREE
qemu() {
  open_archive bookworm trixie trixie-backports || return
  version_in "$1" | grep . >/dev/null || return
  unpack "$1" "$2" -E . qemu-system-x86 || return
  printf '%s\n' "$WRAPPER" >"$2/qemu-system-x86_64"
  chmod 755 "$2/qemu-system-x86_64"
  printf %s "$("$2/qemu-system-x86_64" --version | sed -n 's/.*version \([0-9.]*\).*/\1/p')" >"$2/version"
  [[ -s $2/version ]]
}

# The QEMU that a suite has: 1:11.1.3+ds-1~bpo13+1 is 11.1.3.
version_in() {
  apt-cache "${beside[@]}" madison qemu-system-x86 | awk -F'|' -v suite=" $1/" 'index($3, suite) { print $2 }' |
    sed -nE '1s/^ *([0-9]+:)?([0-9.]+).*/\2/p'
}

# environment PROBE PACKAGE... TREE: a Python environment.
environment() {
  local tree=${!#}
  python3 -m venv "$tree" && "$tree/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2:$#-2}" &&
    "$tree/bin/python" -c "$1"
}

# vsock_tests TREE: newer than the guests' kernel, with more cases. Each says which kernel it needs.
vsock_tests() {
  local source=linux-source-6.12 tests
  one "$source" trixie "$scratch/source" &&
    tar -xJf "$scratch/source/usr/src/$source.tar.xz" -C "$scratch" "$source/tools/testing/vsock" "$source/tools/include" || return
  tests=$scratch/$source/tools/testing/vsock
  make -C "$tests" vsock_test vsock_perf >/dev/null && mkdir "$1" && cp "$tests"/vsock_{test,perf} "$1"
}

# add_module DIRECTORY NAME: adds a module to the tree of an initramfs, after those that its `depends=` names.
add_module() {
  local file need name=$2
  [[ ! -f $tree/modules/$name.ko ]] || return 0
  ! grep -qE "/${name//_/[-_]}\.ko" "$1/modules.builtin" || return 0
  file=$(find "$1" -name "${name//_/[-_]}.ko*" | grep .) ||
    die "the kernel has no module $name, neither as a file nor built in"
  if [[ $file == *.xz ]]; then xz -dc "$file"; else cat "$file"; fi >"$scratch/$name.ko"
  for need in $(tr '\0' '\n' <"$scratch/$name.ko" | sed -n 's/^depends=//p' | tr ',-' ' _'); do add_module "$1" "$need"; done
  mv "$scratch/$name.ko" "$tree/modules/"
  echo "$name.ko" >>"$tree/modules/order"
}

# vmlinux KERNEL: the kernel as an ELF file, which starts in 2.2 s where one that unpacks itself in the emulation takes 2.8.
# Its place in the file is in Linux's Documentation/arch/x86/boot.rst: setup_sects, payload_offset and payload_length.
vmlinux() {
  local image at length unpack
  [[ ! -f $lab/$1/vmlinux ]] || return 0
  image=$(echo "$lab/$1"/boot/vmlinuz-*)
  field() { od -An -j "$1" -N "$2" -t "u$2" "$image" | tr -d ' '; }
  at=$((($(field 0x1f1 1) + 1) * 512 + $(field 0x248 4))) length=$(field 0x24c 4)
  # But for gzip's, four bytes with the unpacked size follow.
  case $(od -An -j "$at" -N 2 -t x1 "$image") in
  " 02 21") unpack="lz4 -dcq" length=$((length - 4)) ;;
  " 28 b5") unpack="zstd -dcq" length=$((length - 4)) ;;
  " fd 37") unpack="xz -dcq" length=$((length - 4)) ;;
  *) unpack="gzip -dc" ;;
  esac
  # The demo installs none of them.
  command -v "${unpack%% *}" >/dev/null || return 0
  if dd if="$image" iflag=skip_bytes,count_bytes skip="$at" count="$length" bs=1M status=none | $unpack >"$scratch/vmlinux" &&
    [[ $(od -An -N 4 -t x1 "$scratch/vmlinux") == " 7f 45 4c 46" ]]; then
    mv "$scratch/vmlinux" "$lab/$1/vmlinux"
    changed=yes
  else
    say "$image is not unpacked: its guests start more slowly"
  fi
}

# initramfs KERNEL ARCHIVE: the first file system of guests with this kernel, unless it is of these sources.
# Linux has /dev/console in the one that is built into it.
initramfs() {
  local kernel stamp tree=$scratch/root name triple=x86_64-unknown-linux-gnu
  kernel=$(echo "$lab/$1"/boot/vmlinuz-*)
  stamp=$({ echo "$kernel" && cat "$0" "$root"/lab/agent/Cargo.* "$root"/lab/agent/src/*; } | sha256sum)
  [[ ! -f $lab/$2 || $(cat "$lab/$2.stamp" 2>/dev/null) != "$stamp" ]] || return 0
  say "building the guest's agent and $2"
  # The agent is a separate workspace, whose dependencies are built for the guest. A guest has no C library.
  env -u CARGO_ENCODED_RUSTFLAGS RUSTFLAGS="-C target-feature=+crt-static" "${CARGO:-cargo}" build --quiet --release \
    --manifest-path "$root/lab/agent/Cargo.toml" --target "$triple" --target-dir "$lab/agent"
  rm -rf "$tree"
  mkdir -p "$tree"/{bin,dev,etc,modules,proc,run,sys,tmp}
  cp "$lab/agent/$triple/release/towline-lab-agent" "$tree/init"
  cp "$lab/busybox/bin/busybox" "$tree/bin/busybox"
  chmod 755 "$tree/init" "$tree/bin/busybox"
  for name in $APPLETS; do ln -s busybox "$tree/bin/$name"; done
  for name in $MODULES; do add_module "$lab/$1/lib/modules/${kernel##*/vmlinuz-}" "$name"; done
  # The same content makes the same archive. A guest that boots meanwhile reads the old one or the new one, never
  # half of one.
  find "$tree" -exec touch -hd @0 {} +
  (cd "$tree" && find . -mindepth 1 | sed 's|^\./||' | sort |
    bin/busybox cpio -o -H newc -R 0:0 --ignore-devno --renumber-inodes 2>/dev/null) >"$scratch/$2"
  mv "$scratch/$2" "$lab/$2"
  echo "$stamp" >"$lab/$2.stamp"
  changed=yes
}

# Says whether Debian has newer QEMUs than the lab, and than those that towline is tested with.
newer() {
  local suite there here tested
  tested=$(sed -nE 's/.*TESTED_TO: \(u32, u32\) = \(([0-9]+), ([0-9]+)\);/\1.\2/p' "$root/crates/compat/src/rules/qemu_version.rs")
  open_archive trixie trixie-backports sid
  for suite in trixie:qemu-stable trixie-backports:qemu-newest sid:; do
    there=$(version_in "${suite%:*}")
    here=$(cat "$lab/${suite#*:}/version" 2>/dev/null || true)
    echo "${suite%:*}: QEMU ${there:-none}${here:+, in the lab $here}"
    if [[ $here ]] && dpkg --compare-versions "$there" gt "$here"; then
      echo "  NEWER than the lab's; remove $lab/${suite#*:} and run \`cargo xtask setup\` to test it"
    fi
    if dpkg --compare-versions "$there" ge "$tested.99"; then
      echo "  NEWER than the QEMUs that towline is tested with, of which $tested is the last"
    fi
  done
}

[[ $codename == bookworm || $codename == trixie ]] ||
  die "this machine is \`$codename\`: the set-up knows Debian 12 (bookworm) and 13 (trixie); use one or a container"
scope=${1:-lab}
changed=
case $scope in
demo) system iproute2 ;;
# What sshd of Debian 13 needs.
lab | system) system $TOOLS $([[ $codename == bookworm ]] || echo libwtmpdb0) ;;
esac
[[ $scope != system ]] || exit 0
scratch_in "$lab"
case $scope in
newer) newer ;;
vsock-tests) bring_required vsock-tests vsock_tests ;;
*)
  bring_required kernel kernel bookworm
  bring_required busybox one busybox-static bookworm
  if [[ $scope == lab ]]; then
    bring_required qemu-7.2 qemu_7_2
    bring_required openssh-server one openssh-server "$codename"
    bring_optional cluster cluster
    bring_optional qemu-stable qemu trixie
    bring_optional qemu-newest qemu trixie-backports
    bring_optional kernel-newest kernel trixie-backports
    bring_optional python environment "import websockets" websockets==15.0.1
    # Not `moto[server]`, which brings every service's packages.
    bring_optional python-s3 environment "import moto.server" 'moto[s3]==5.2.5' flask==3.1.3 flask-cors==6.0.5
    bring_optional python-qmp environment "import qemu.qmp" qemu.qmp==0.0.6
  fi
  vmlinux kernel
  initramfs kernel initramfs
  [[ ! -d $lab/kernel-newest ]] || { vmlinux kernel-newest; initramfs kernel-newest initramfs-newest; }
  [[ ! $changed ]] || say "ready in $SECONDS s ($lab)"
  ;;
esac
