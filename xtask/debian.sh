# Functions for the scripts that source this file: Debian packages, installed on this machine or unpacked beside it.
#
# Everything comes from the mirror that this machine's apt has. Packages to unpack may be of another release: apt
# keeps their lists in a separate directory, in which no package is installed. Hence the C library is among what a
# program needs.

export DEBIAN_FRONTEND=noninteractive LC_ALL=C
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${TOWLINE_TARGET:-$root/target}
task=$(basename "$0" .sh)
codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
# Libraries that a program of another release shares with the dynamic loader of this machine.
RUNTIME='^(libc6|libgcc-s1|libstdc\+\+6|gcc-12-base)_'

say() { echo "$task: $*"; }
die() {
  echo "$task: $*" >&2
  exit 1
}

# Directory for what is being made, removed at the end: beside what is kept, which is renamed into its place.
scratch_in() {
  mkdir -p "$1"
  scratch=$(mktemp -d "$1/.making-XXXXXX")
  trap 'rm -rf "$scratch"' EXIT
}

apt_get() {
  apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -o Acquire::http::Timeout=30 \
    -o APT::Sandbox::User=root "$@" </dev/null
}

# Fetches this machine's lists. Another program may hold them.
update() {
  say "fetching the lists of packages"
  apt_get update || { sleep 20 && apt_get update; }
}

# The version of a package that is installed.
installed() { dpkg-query -W -f '${db:Status-Status} ${Version}\n' "$1" 2>/dev/null | sed -n 's/^installed //p'; }

missing() {
  local package
  for package; do [[ $(installed "$package") ]] || echo "$package"; done
}

# Installs packages, with options of apt before them. Lists that are absent, or older than the mirror, are fetched again once.
apt_install() {
  local install=(apt_get install --no-install-recommends "$@")
  [[ $(id -u) == 0 ]] ||
    die "installing $* needs root; run: sudo '$root/xtask/setup.sh' system, or apt-get install, and this again"
  say "installing $*"
  "${install[@]}" >/dev/null 2>&1 || { update && "${install[@]}" >/dev/null; } ||
    die "$* cannot be installed; check that this machine reaches its Debian mirror and that dpkg --audit is silent"
}

require() {
  local wanted
  wanted=$(missing "$@")
  [[ ! $wanted ]] || apt_install $wanted
}

# The mirror of this machine's own release.
mirror() {
  apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    awk '($2 == "bookworm" || $2 == "trixie") && $3 == "main" && !found++ { print $1 }' | grep . ||
    die "no source in /etc/apt brings main of bookworm or trixie, whose mirror has the other releases too"
}

# Makes $archive/sources.list name these suites, signed by a keyring that has Debian 13's keys.
sources_of() {
  local suite keyring=$KEYRING from
  mkdir -p "$archive/packages"
  if [[ ! -f ${KEYRING%-keyring.gpg}-trixie-stable.gpg ]]; then
    # This machine's keyring is older than Debian 13; its mirror has a later one.
    cd "$archive/packages" || return
    apt_get download debian-archive-keyring || { update && apt_get download debian-archive-keyring; } || return
    cd - >/dev/null || return
    dpkg-deb -x "$archive"/packages/debian-archive-keyring_*.deb "$archive/keys" || return
    keyring=$archive/keys$KEYRING
  fi
  from=$(mirror) || return
  for suite; do echo "deb [signed-by=$keyring target=Packages] $from $suite main"; done >"$archive/sources.list"
}

# Fetches lists of these suites, for `unpack` and for `apt-cache "${beside[@]}"`.
open_archive() {
  [[ ! ${archive-} ]] || return 0
  archive=$scratch/archive
  mkdir -p "$archive"/{lists/partial,cache/archives/partial}
  : >"$archive/status"
  sources_of "$@" || return
  beside=(-o Dir::Etc::SourceList="$archive/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null -o Dir::State="$archive"
    -o Dir::State::Lists="$archive/lists" -o Dir::State::Status="$archive/status"
    -o Dir::State::Extended_States="$archive/extended" -o Dir::Cache="$archive/cache" -o Acquire::Languages=none)
  if grep -rqsi 'check-valid-until[=: ]*no' /etc/apt/sources.list /etc/apt/sources.list.d; then
    beside+=(-o Acquire::Check-Valid-Until=no)
  fi
  say "fetching the lists of $*"
  # A mirror may have some of the suites; what is of the others fails by name.
  apt_get "${beside[@]}" update || true
}

# unpack SUITE TREE GREP-OPTION REGEX PACKAGE...: unpacks the archives of the packages and of all that they need,
# if their names match.
unpack() {
  local suite=$1 tree=$2 option=$3 regex=$4 files file rest wanted=()
  shift 4
  open_archive bookworm trixie trixie-backports || return
  files=$(apt_get "${beside[@]}" install --print-uris --no-install-recommends -t "$suite" "$@" |
    sed -nE "s/^'[^']*' ([^ ]+\.deb) .*/\1/p" | grep "$option" "$regex") || return
  for file in $files; do
    rest=${file#*_}
    rest=${rest%_*}
    [[ -f $archive/packages/$file ]] || wanted+=("${file%%_*}=${rest//%3a/:}")
  done
  say "downloading $* of $suite, ${#wanted[@]} packages"
  (cd "$archive/packages" && apt_get "${beside[@]}" download "${wanted[@]}") || return
  for file in $files; do dpkg-deb -x "$archive/packages/$file" "$tree" || return; done
}

# Moves a finished tree; another process that was faster has made the same one.
into_place() { mv -T "$1" "$2" 2>/dev/null || [[ -d $2 ]]; }
