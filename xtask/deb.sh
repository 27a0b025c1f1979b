#!/usr/bin/env bash
# Builds Debian packages below target/deb, installs them into an empty root and runs them there: `cargo xtask deb [--debug]`.
#
#   cargo build ─► a tree as it will stand on a host ─► dpkg-deb ─► dpkg --root into an empty root ─► run from there
#
# The program writes its manual pages and completions. Debian's variables, DEBFULLNAME and DEBEMAIL, name the
# distributor.
# Out of scope: an upload to Debian, which takes source packages and debhelper.
set -euo pipefail
source "$(dirname "$0")/debian.sh"
cd "$root"
work=$target/deb
tree=$work/tree
doc=$tree/usr/share/doc/towline
host=$work/host

if [[ ${1-} == --debug ]]; then profile=dev build=debug; else profile=release build=release; fi
"${CARGO:-cargo}" build --package towline-cli --profile "$profile"
program=$target/$build/towline
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
homepage=$(sed -n 's/^repository = "\(.*\)"/\1/p' Cargo.toml)
maintainer="${DEBFULLNAME:-The towline authors} <${DEBEMAIL:-towline@localhost}>"
architecture=$(dpkg --print-architecture)
package=$work/towline_${version}_$architecture.deb
agent=$work/agent
agent_package=$work/towline-pacemaker_${version}_all.deb

rm -rf "$work"
install -D -m 755 "$program" "$tree/usr/bin/towline"
strip --strip-unneeded --remove-section=.comment --remove-section=.note "$tree/usr/bin/towline"
# By whose name the program is a vhost-user backend.
mkdir -p "$tree/usr/lib/towline" "$tree/DEBIAN"
ln -s ../../bin/towline "$tree/usr/lib/towline/towline-net"
ln -s ../../bin/towline "$tree/usr/lib/towline/towline-vsock"
install -D -m 644 -t "$tree/usr/lib/systemd/system" units/*
install -D -m 644 -t "$tree/usr/share/qemu/vhost-user" packaging/*.json
"$program" man "$tree/usr/share/man/man1"
mkdir -p "$tree"/usr/share/{bash-completion/completions,zsh/vendor-completions,fish/vendor_completions.d}
"$program" completions bash >"$tree/usr/share/bash-completion/completions/towline"
"$program" completions zsh >"$tree/usr/share/zsh/vendor-completions/_towline"
"$program" completions fish >"$tree/usr/share/fish/vendor_completions.d/towline.fish"
mkdir -p "$doc"
cp -r README.md CHANGELOG.md ARCHITECTURE.md CONTRIBUTING.md SECURITY.md LICENSE-APACHE LICENSE-MIT docs "$doc"
# They refer to each other, and else to the sources.
(cd "$doc" && find . -name '*.md') | while read -r page; do
  for link in $(grep -oE '\]\([^)#]+' "$doc/$page" | cut -c3- | grep -vE '://|crates/|fuzz/' || true); do
    [[ -e $doc/$(dirname "$page")/$link ]] || die "$page refers to $link, which is not in the package"
  done
done
# Dates are those of the last commit: a commit always makes the same package.
cat >"$doc/copyright" <<END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: towline
Source: $homepage

Files: *
Copyright: $(git log -1 --format=%ad --date=format:%Y) the towline authors
License: Apache-2.0 or Expat
 Both are in this directory, as LICENSE-APACHE and LICENSE-MIT.
END
cat >"$doc/changelog" <<END
towline ($version) unstable; urgency=medium

  * Changes are in /usr/share/doc/towline/CHANGELOG.md.

 -- $maintainer  $(git log -1 --format=%aD)
END
gzip -9n "$doc/changelog" "$tree"/usr/share/man/man1/*
chmod -R u=rwX,go=rX "$tree"

libc=$(grep -aoE 'GLIBC_2\.[0-9]+' "$tree/usr/bin/towline" | sort -Vu | tail -n 1)
cat >"$tree/DEBIAN/control" <<END
Package: towline
Version: $version
Architecture: $architecture
Maintainer: $maintainer
Installed-Size: $(du -sk --apparent-size "$tree" | cut -f1)
Depends: libc6 (>= ${libc#GLIBC_}), libgcc-s1
Recommends: qemu-system-x86
Section: admin
Priority: optional
Homepage: $homepage
Description: move, save and restore running QEMU guests
 Copies a guest from one QEMU to another, into an image or an object store,
 and back. Images have checksums, and restored guests can run while their
 memory follows.
 .
 Also a multiqueue network card, which migrates with its guest, and a vsock
 device for guests (vhost-user).
END
(cd "$tree" && find usr -type f | sort | xargs -d '\n' md5sum >DEBIAN/md5sums)
dpkg-deb --root-owner-group --build -Zxz "$tree" "$package" >/dev/null

# The resource agent of Pacemaker, which hosts without a cluster do without.
install -D -m 755 -t "$agent/usr/lib/ocf/resource.d/towline" packaging/pacemaker/{guest,protected}
install -D -m 644 -t "$agent/usr/share/doc/towline-pacemaker" "$doc/copyright" "$doc/changelog.gz"
mkdir "$agent/DEBIAN"
cat >"$agent/DEBIAN/control" <<END
Package: towline-pacemaker
Version: $version
Architecture: all
Maintainer: $maintainer
Installed-Size: $(du -sk --apparent-size "$agent" | cut -f1)
Depends: towline (= $version), pacemaker, openssh-client, openssh-server
Section: admin
Priority: optional
Homepage: $homepage
Description: resource agents for QEMU guests that towline moves and protects
 ocf:towline:guest, by which Pacemaker starts, stops and monitors guests, moves
 them live to another host, and restarts those of a dead host from their newest
 state; ocf:towline:protected, by which it decides which of two hosts goes on
 with a guest of towline protect.
END
(cd "$agent" && find usr -type f | sort | xargs -d '\n' md5sum >DEBIAN/md5sums)
dpkg-deb --root-owner-group --build -Zxz "$agent" "$agent_package" >/dev/null

# Its libraries are this host's; the root has none.
in_root() { dpkg --force-not-root --force-bad-path --force-depends --force-script-chrootless --log=/dev/null --root="$host" "$@"; }
mkdir -p "$host"/var/lib/dpkg/{info,updates}
: >"$host/var/lib/dpkg/status"
log=$(in_root --install "$package" 2>&1) || die "$log"
[[ $("$host/usr/bin/towline" --version) == "towline $version" ]] || die "--version does not print towline $version"
log=$(in_root --install "$agent_package" 2>&1) || die "$log"
for type in guest protected; do
  PATH=$host/usr/bin:$PATH "$host/usr/lib/ocf/resource.d/towline/$type" meta-data | grep -F "<resource-agent name=\"$type\"" >/dev/null ||
    die "the resource agent $type has no meta-data"
done
for descriptor in "$host"/usr/share/qemu/vhost-user/*; do
  kind=$(sed -n 's/.*"type": "\(.*\)".*/\1/p' "$descriptor")
  backend=$host$(sed -n 's/.*"binary": "\(.*\)".*/\1/p' "$descriptor")
  "$backend" --fd 3 --print-capabilities | grep -E "\"type\": *\"$kind\"" >/dev/null ||
    die "$descriptor: $backend is not a $kind device"
done
for unit in "$host"/usr/lib/systemd/system/*; do
  for path in $(sed -nE 's/^ExecStart=(\/[^ ]*).*/\1/p' "$unit"); do
    [[ -f $host$path ]] || die "$unit: $path is not in the package"
  done
done
verified=$(in_root --verify towline towline-pacemaker)
[[ ! $verified ]] || die "dpkg --verify: $verified"
log=$(in_root --purge towline-pacemaker towline 2>&1) || die "$log"
[[ ! -e $host/usr/bin/towline ]] || die "$host/usr/bin/towline is still there after the package was removed"
say "$package $agent_package"
