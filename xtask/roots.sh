#!/usr/bin/env bash
# Fresh roots of Debian, below target/roots, for `cargo xtask soak`. mmdebstrap makes them; all are removed afterwards.
#
#   roots.sh package    the package in Debian 12 and 13: installed by apt, README's first steps pasted, removed;
#                       and the steps of Containerfile, without a container engine
#   roots.sh demo|test  `make demo` or `make test` in Debian 13, from a clone of the last commit, with this
#                       machine's Rust and kernel
#   roots.sh lintian    Debian's checks of the package: errors and warnings fail
#
# The package is of the release build, or of the debug build if TOWLINE_SOAK_DEBUG is set.
set -euo pipefail
source "$(dirname "$0")/debian.sh"
archive=$target/roots

package() {
  "$root/xtask/deb.sh" ${TOWLINE_SOAK_DEBUG+--debug}
  deb=$(echo "$target"/deb/towline_*.deb)
}

# bootstrap RELEASE PLACE OPTION...
bootstrap() {
  sources_of "$1"
  timeout --kill-after=30 1800 mmdebstrap --mode=root --variant=apt "${@:3}" "$1" "$2" "$archive/sources.list"
}

# The package in a root of this release.
installed_in() {
  local step hooks=()
  for step in "apt-get install -qy --no-install-recommends /srv/$(basename "$deb")" "towline --version" \
    "test -f /usr/share/man/man1/towline.1.gz" "bash /srv/first-steps.sh" "apt-get purge -qy towline" \
    "! test -e /usr/bin/towline"; do
    hooks+=(--customize-hook="chroot \"\$1\" bash -c '$step'")
  done
  bootstrap "$1" - --format=null --include=ca-certificates,qemu-system-x86,seabios,ipxe-qemu,bash \
    --customize-hook="copy-in $deb $archive/first-steps.sh /srv" "${hooks[@]}"
}

# Steps of the recipe, in a root of the release that it names.
recipe() {
  local name arguments hooks=()
  while read -r name arguments; do
    case $name in
    FROM | LABEL | CMD) ;;
    COPY) hooks+=(--customize-hook="copy-in $deb ${arguments#* }") ;;
    RUN)
      echo "$arguments" >"$archive/run.sh"
      hooks+=(--customize-hook="chroot \"\$1\" sh -e <'$archive/run.sh'")
      ;;
    ENTRYPOINT) hooks+=(--customize-hook="chroot \"\$1\" $(tr -d '[],"' <<<"$arguments") --version") ;;
    *) die "Containerfile: $name: unknown instruction" ;;
    esac
  done < <(grep -v '^ *#' "$root/Containerfile" | sed -e ':join' -e '/\\$/{N;s/\\\n//;b join' -e '}')
  bootstrap "$(sed -n 's/^FROM debian:\(.*\)-slim$/\1/p' "$root/Containerfile")" - --format=null "${hooks[@]}" \
    --customize-hook='! ls "$1"/tmp/towline_*.deb "$1"/var/lib/apt/lists/*_Packages 2>/dev/null'
}

# make_in_debian_13 TARGET
make_in_debian_13() {
  local place=$archive/debian-13 authorities=/usr/local/share/ca-certificates
  ! grep -qF " $place/" /proc/self/mountinfo || die "$place: something is mounted there; unmount it first"
  rm -rf "$place"
  # What README expects of a user, besides rustup's programs.
  bootstrap trixie "$place" --include=ca-certificates,git,make
  # This machine's way to the network: name servers, its certificate authorities, pip's settings.
  cp -L /etc/resolv.conf "$place/etc/resolv.conf"
  [[ ! -f /etc/pip.conf ]] || cp /etc/pip.conf "$place/etc/pip.conf"
  [[ ! -d $authorities ]] || { cp -rLT "$authorities" "$place$authorities" && chroot "$place" update-ca-certificates; }
  git clone --quiet "$root" "$place/srv/towline"
  # All mounts end with the namespace. Only a mount can be a root in which namespaces change the propagation.
  timeout --kill-after=30 5400 unshare --mount --pid --fork --kill-child bash -eu -c '
    mount --bind "$1" "$1"
    mkdir -p "$1/root/.cargo" "$1/root/.rustup"
    mount -t proc proc "$1/proc"
    mount --rbind /sys "$1/sys"
    mount --rbind /dev "$1/dev"
    mount -t tmpfs -o mode=755 tmpfs "$1/run"
    mount --bind "$2" "$1/root/.cargo"
    mount --bind "$3" "$1/root/.rustup"
    exec chroot "$1" env -i HOME=/root LANG=C.UTF-8 \
      PATH=/root/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin make -C /srv/towline "$4"' \
    bash "$place" "${CARGO_HOME:-$HOME/.cargo}" "${RUSTUP_HOME:-$HOME/.rustup}" "$1"
  rm -rf "$place"
}

mkdir -p "$archive"
case ${1-} in
package)
  require mmdebstrap
  package
  # A paste into an interactive shell would go on after an error, and leave its QEMUs.
  {
    echo "set -e; trap 'kill \$(jobs -p) 2>/dev/null' EXIT"
    awk '/^<!-- first steps:/ { found = 1 } found && /^```$/ { fences++; next } fences == 1' "$root/README.md"
    echo "wait; trap - EXIT"
  } >"$archive/first-steps.sh"
  for release in bookworm trixie; do installed_in "$release"; done
  recipe
  ;;
demo | test)
  require mmdebstrap
  make_in_debian_13 "$1"
  ;;
lintian)
  require lintian
  package
  # Tags about uploads to Debian itself, and about the maintainer's address, which DEBEMAIL would set.
  suppressed=initial-upload-closes-no-bugs,no-manual-page
  [[ ${DEBEMAIL-} ]] || suppressed+=,bogus-mail-host,bogus-mail-host-in-debian-changelog
  lintian --allow-root --info --tag-display-limit 0 --fail-on error,warning --suppress-tags "$suppressed" "$deb"
  ;;
*) die "expected package, demo, test or lintian" ;;
esac
rm -rf "$archive"
