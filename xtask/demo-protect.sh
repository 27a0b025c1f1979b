#!/usr/bin/env bash
# A guest is protected by another host: four connections to it go on when its own host dies. As root.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
bash xtask/setup.sh lab
"$cargo" build --profile demo --package towline-cli
echo 'demo: two hosts and a client as network namespaces; all processes of the guest'"'"'s host are killed while the client talks to the guest'
TOWLINE_BIN=$PWD/target/demo/towline "$cargo" test --quiet --package towline-lab --test protect -- \
  --exact a_guest_survives_the_death_of_its_host --nocapture
