#!/usr/bin/env bash
# Pages of `--report` in a headless chromium, light, dark and as narrow as a phone, for inspection in
# target/report-browser: `cargo xtask soak report-browser`.
#
#   a Linux guest ── towline move --report ──► another QEMU      move.html ─┐
#   an image ── towline run --count 6 --report ──► clones        run.html ──┴► chromium ─► move-light.png, …
set -euo pipefail
source "$(dirname "$0")/debian.sh"
require chromium fonts-dejavu-core
lab=$(realpath -m "${TOWLINE_LAB:-$root/target/lab}")
pages=$target/report-browser
build=${TOWLINE_SOAK_DEBUG+debug}
build=${build:-release}
"${CARGO:-cargo}" build --package towline-cli --profile "${build/debug/dev}"
PATH=$target/$build:$PATH
scratch_in "$target"
mkdir -p "$pages"
rm -f "$pages"/*

# guest NAME OPTION...: starts a QEMU with a control socket.
guest() {
  qemu-system-x86_64 -machine q35 -m 512 -smp 2 -display none -qmp "unix:$scratch/$1.qmp,server=on,wait=off" "${@:2}" &
}
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$scratch"' EXIT

linux=(-kernel "$(echo "$lab"/kernel/boot/vmlinuz-*)" -initrd "$lab/initramfs" -append "console=ttyS0 panic=-1")
guest source "${linux[@]}"
guest destination "${linux[@]}" -incoming defer
sleep 20
# Slow enough for several samples.
towline move --max-bandwidth 16M --report "$pages/move.html" "qmp:$scratch/source.qmp" "qmp:$scratch/destination.qmp"
guest saved
towline copy "qmp:$scratch/saved.qmp" "$scratch/guest.img"
towline run "$scratch/guest.img" --name "report-$$" --count 6 --report "$pages/run.html" &
timeout 120 bash -c 'until [[ -s $1 ]]; do sleep 0.2; done' bash "$pages/run.html"

# picture PAGE PICTURE OPTION...: nothing can be loaded, and the browser must have nothing to say about the page.
picture() {
  local log
  log=$(timeout --kill-after=5 120 chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --enable-logging=stderr \
    --host-resolver-rules='MAP * ~NOTFOUND' --window-size=1000,1500 --user-data-dir="$scratch/profile" "${@:3}" \
    --screenshot="$pages/$2" "file://$pages/$1" 2>&1) || die "chromium failed: $log"
  ! grep CONSOLE <<<"$log" || die "$1: the browser complains"
  [[ $(stat -c %s "$pages/$2") -ge 20480 ]] || die "$2 is empty"
}
for page in move run; do
  picture "$page.html" "$page-light.png"
  picture "$page.html" "$page-dark.png" --force-dark-mode --blink-settings=preferredColorScheme=0
  ! cmp -s "$pages/$page-light.png" "$pages/$page-dark.png" || die "$page: the page looks the same, light and dark"
  # The browser's own windows are wider than a phone.
  echo "<!doctype html><body style='margin:0'><iframe src='$page.html' width='400' height='1500' style='border:0'></iframe>" \
    >"$pages/$page-narrow.html"
  picture "$page-narrow.html" "$page-narrow.png"
done
say "the pictures are in $pages"
