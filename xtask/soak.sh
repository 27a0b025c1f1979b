#!/usr/bin/env bash
# The long runs, by name: `cargo xtask soak NAME`. `make test` has short ones of the same; these are run before a release is made.
# Without a name: their list, made of the lines that begin with `#:`. Variables that are set already are not overridden.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${TOWLINE_TARGET:-$PWD/target}
cargo=${CARGO:-cargo}

default() {
  local variable
  for variable; do [[ -v ${variable%%=*} ]] || export "$variable"; done
}

# lab SUITE TEST VARIABLE=VALUE...: one test of the lab, on the release build.
lab() {
  default "${@:3}"
  "$cargo" build --release --package towline-cli
  TOWLINE_BIN=$target/release/towline "$cargo" test --package towline-lab --test "$1" -- --exact "$2" --nocapture --include-ignored
}

# crate NAME CARGO-OPTION... -- FILTER...: tests of a crate.
crate() { "$cargo" test --package "towline-$1" "${@:2}" --nocapture --include-ignored; }

# fuzz INPUTS TARGET...: inputs of every length from the beginning, as the interesting ones of a whole device are long.
fuzz() { "$cargo" xtask fuzz --seconds 3600 "${@:2}" -- "-runs=$1" -len_control=0; }

case ${1-} in
#: rss: memory that towline takes to save and restore a guest of 4 GiB
rss) lab matrix footprint::a_copy_takes_little_memory TOWLINE_SOAK_RSS_MIB=4096 ;;
#: simulation: 100,000 migrations in virtual time, others with TOWLINE_SEEDS, and cuts at every byte
simulation)
  default TOWLINE_SEEDS=100000
  TOWLINE_CUT_STEP=1 crate migration --release --test simulation --
  ;;
#: switchover-model: every order of events of a switchover with eight mishaps in a run (TOWLINE_MODEL_MISHAPS): worlds, depth, time
switchover-model)
  default TOWLINE_MODEL_MISHAPS=8
  crate control --lib -- --test-threads 1 switchover::model
  ;;
#: chaos: 2,000 copies of every kind with a fault of any kind at any moment (TOWLINE_CHAOS_RUNS, TOWLINE_CHAOS_SEED, TOWLINE_CHAOS_JOBS);
#:   continues where it was stopped, by the journal target/chaos.journal (TOWLINE_CHAOS_JOURNAL)
chaos) lab chaos no_fault_costs_a_guest_or_runs_two TOWLINE_CHAOS_RUNS=2000 TOWLINE_CHAOS_JOURNAL="$target/chaos.journal" ;;
#: kills: 200 moves in which a QEMU, towline or a connection is killed (TOWLINE_SOAK_KILLS, TOWLINE_SOAK_SEED)
kills) lab live kills::no_guest_is_lost_or_runs_twice TOWLINE_SOAK_KILLS=200 ;;
#: host-kills: 150 moves to another host in which a process of theirs is killed, or the link between the hosts is cut
#:   (TOWLINE_SOAK_HOST_KILLS, TOWLINE_SOAK_SEED)
host-kills) lab hosts kills::a_kill_at_any_moment_leaves_one_guest TOWLINE_SOAK_HOST_KILLS=150 ;;
#: host-postcopy: 50 moves by postcopy to another host with mishaps after the switch (TOWLINE_SOAK_POSTCOPY_MOVES, TOWLINE_SOAK_SEED)
host-postcopy) lab hosts postcopy::a_postcopy_arrives_through_mishaps_at_random_moments TOWLINE_SOAK_POSTCOPY_MOVES=50 ;;
#: host-emptied: twelve guests that share a link of 1 Gbit/s (TOWLINE_SOAK_HOST_GUESTS): time and bytes, one by one and several at a time
host-emptied) lab hosts all::guests_of_a_host_share_its_link TOWLINE_SOAK_HOST_GUESTS=12 ;;
#: protected-deaths: 200 deaths of a protected guest's host, of all its processes or cut off (TOWLINE_SOAK_PROTECT_KILLS, TOWLINE_SOAK_SEED)
protected-deaths) lab protect guests_survive_deaths_of_their_hosts_at_any_moment TOWLINE_SOAK_PROTECT_KILLS=200 ;;
#: protected-disturbances: 100 disturbances of a protected guest: the link between its hosts is cut for a while, or a process is stopped
#:   (TOWLINE_SOAK_PROTECT_DISTURBANCES, TOWLINE_SOAK_SEED)
protected-disturbances)
  lab protect losses::one_host_has_a_guest_whose_protection_is_disturbed_at_any_moment TOWLINE_SOAK_PROTECT_DISTURBANCES=100
  ;;
#: cluster-disturbances: 100 disturbances of a guest of whose hosts a cluster decides: hosts die, are cut off or stand, processes stop or die
#:   (TOWLINE_SOAK_CLUSTER_DISTURBANCES, TOWLINE_SOAK_SEED)
cluster-disturbances)
  lab cluster disturbed::a_cluster_decides_while_anything_is_disturbed TOWLINE_SOAK_CLUSTER_DISTURBANCES=100
  ;;
#: checkpoints: checkpoints of a stock QEMU, each compared with its memory; then the same while a card and a disk write to it
#:   (TOWLINE_SOAK_CHECKPOINTS)
checkpoints)
  lab colo each_checkpoint_is_the_memory_of_the_primary_while_it_stands TOWLINE_SOAK_CHECKPOINTS=2000
  lab colo each_checkpoint_is_the_memory_of_a_primary_whose_card_and_disk_write_it
  ;;
#: host-ways: a guest of 1 GiB over 1 Gbit/s by each way of `move` and by QEMU's own commands in turns: time, downtime, bytes, processors
host-ways) lab hosts ways::a_guest_goes_to_another_host_by_each_way TOWLINE_SOAK_WAYS=15 ;;
#: host-disks: a guest with a disk of 512 MiB moved by towline and by QEMU's own commands in turns: time and downtime
host-disks) lab hosts beside_qemu::a_disk_and_memory_go_to_another_qemu TOWLINE_SOAK_DISK_MOVES=15 ;;
#: moves: 50 moves in a row of one Linux guest that writes its memory (TOWLINE_SOAK_MOVES)
moves) lab live moves::a_busy_linux_continues_at_its_destination TOWLINE_SOAK_MOVES=50 ;;
#: qmp-latency: how long query-migrate takes while 4 GiB move at full rate (TOWLINE_SOAK_LATENCY_MIB)
qmp-latency) lab control latency::queries_are_answered_while_memory_moves TOWLINE_SOAK_LATENCY_MIB=4096 ;;
#: pairs: every pair of QEMUs that differ: the verdict against a migration by QEMU itself and a move (TOWLINE_PAIR: only one)
pairs)
  lab pairs verdicts_agree_with_what_happens TOWLINE_SOAK_PAIRS=1
  lab pairs verdicts_on_the_newest_qemu_agree_with_what_happens TOWLINE_SOAK_PAIRS=1
  lab pairs verdicts_between_hosts_agree_with_what_happens TOWLINE_SOAK_PAIRS=1
  ;;
#: versions: each QEMU with the newest one (11.1), in every way that a guest can go, and Linux 7 with a vsock (TOWLINE_CROSSING: only
#:   those whose name has this)
versions)
  lab matrix crossings::guests_cross_from_version_to_version TOWLINE_SOAK_VERSIONS=1
  lab tls the_newest_qemu_and_each_other_one
  lab vsock a_linux_7_of_the_newest_qemu
  ;;
#: upgrades: 100 upgrades in a row under a load: the guest's downtime, bytes moved (TOWLINE_UPGRADES, sizes: TOWLINE_UPGRADE_MIB=512,1024)
upgrades)
  lab upgrade series::upgrades_in_a_row_under_a_load_lose_nothing TOWLINE_UPGRADES=100
  lab upgrade series::guests_in_memfds_of_7_2_have_a_short_downtime
  lab upgrade series::guests_in_memfds_of_10_0_continue
  ;;
#: upgrades-cards: 100 upgrades in a row of a guest whose card is in traffic: its downtime, the longest gap of frames, every byte compared
#:   (TOWLINE_UPGRADES, TOWLINE_UPGRADE_MIB)
upgrades-cards) lab upgrade cards::connections_of_a_card_survive_in_another_qemu TOWLINE_UPGRADES=100 ;;
#: upgrades-cpr: 20 times QEMU's own cpr-transfer, and 20 upgrades, of one small guest: their downtime (TOWLINE_UPGRADES)
upgrades-cpr) lab upgrade cpr::qemus_own_transfer_beside_an_upgrade TOWLINE_UPGRADES=20 ;;
#: upgrade-kills: 200 upgrades in which a QEMU or towline is killed, and 20 in which the process of the guest's card is
#:   (TOWLINE_UPGRADE_KILLS, TOWLINE_UPGRADE_CARD_KILLS, TOWLINE_UPGRADE_SEED)
upgrade-kills)
  lab upgrade kills::a_kill_at_any_moment_leaves_one_guest TOWLINE_UPGRADE_KILLS=200
  lab upgrade cards::a_card_that_is_killed_at_any_moment_returns_to_the_one_guest TOWLINE_UPGRADE_CARD_KILLS=20
  ;;
#: upgrade-boundaries: memory after a load that is given up after each section of the device state
upgrade-boundaries)
  lab upgrade aborted::memory_is_bit_equal_after_a_load_that_is_given_up_at_any_section TOWLINE_UPGRADE_BOUNDARIES=0
  ;;
#: clones: eight guests of 512 MiB out of one image at once: times, and towline's memory (TOWLINE_SOAK_CLONES_MIB)
clones) lab images clones::eight_guests_are_restored_from_one_image_at_once TOWLINE_SOAK_CLONES_MIB=512 ;;
#: instant-clones: the same with --postcopy: each runs at once
instant-clones) lab images clones::eight_guests_run_at_once_and_their_memory_follows TOWLINE_SOAK_CLONES_MIB=512 ;;
#: run-clones: 100 guests of 512 MiB by one `towline run` (TOWLINE_SOAK_RUN_CLONES): times and memory; that they run on for a time, and
#:   the image afterwards (TOWLINE_SOAK_RUN_SECONDS); beside 30 with memory of their own (TOWLINE_SOAK_RUN_COPIES)
run-clones)
  lab run many::clones_share_the_memory_of_their_image TOWLINE_SOAK_RUN_CLONES=100 TOWLINE_SOAK_RUN_SECONDS=600
  lab run many::clones_with_memory_of_their_own_run TOWLINE_SOAK_RUN_COPIES=30
  ;;
#: run-stores: 20 times `towline run` of an image in a store with a delay, at once, by a file of the host and by one that is there: times
#:   to the first tick (TOWLINE_SOAK_STORE_RUNS)
run-stores) lab run stores::guests_of_a_slow_store_run_at_once_or_from_a_file_of_the_host TOWLINE_SOAK_STORE_RUNS=20 ;;
#: fork: 200 forks that are killed or cancelled at any moment (TOWLINE_SOAK_FORK_KILLS, TOWLINE_SOAK_SEED); 200 forks whose memory is compared with that
#:   of their guest, and 200 of a guest that writes at full rate and checks itself (TOWLINE_SOAK_FORKS); 100 at once, and 100 of a guest
#:   with a connection (TOWLINE_SOAK_FORK_COUNT)
fork)
  lab run forks::faults::a_fork_that_is_killed_leaves_the_guest_running TOWLINE_SOAK_FORK_KILLS=200
  lab run forks::a_fork_is_the_guest_byte_by_byte TOWLINE_SOAK_FORKS=200
  lab run forks::a_fork_of_a_guest_that_writes_has_one_instant
  lab run forks::a_guest_of_the_newest_qemu_that_writes_is_stored_at_one_instant
  lab run forks::many::many_forks_run_and_share_the_image_of_their_guest TOWLINE_SOAK_FORK_COUNT=100
  lab run forks::many::a_connection_of_the_guest_outlives_its_forks
  ;;
#: snapshots: one of a guest with a disk every two seconds for an hour: standstill, room; the last 20 run (TOWLINE_SOAK_SNAPSHOTS)
snapshots) lab run instants::snapshots_of_a_guest_that_writes_each_run_on_the_disk_of_their_instant TOWLINE_SOAK_SNAPSHOTS=1800 ;;
#: record: a guest with a disk recorded every second for an hour (TOWLINE_SOAK_RECORD_SECONDS), killed at half of it: standstill, room; 60
#:   instants at random run (TOWLINE_SOAK_RECORD_RUNS, TOWLINE_SOAK_SEED)
record)
  lab run record::instants_of_a_guest_that_writes_run_with_their_disks_also_after_a_kill TOWLINE_SOAK_RECORD_SECONDS=3600 \
    TOWLINE_SOAK_RECORD_RUNS=60
  ;;
#: standby-disturbances: 100 takeovers of a recorded guest by one of three standbys, of which one or two stop for a while or die
#:   (TOWLINE_SOAK_STANDBYS, TOWLINE_SOAK_SEED)
standby-disturbances) lab run disturbed::a_guest_runs_once_whatever_happens_to_its_standbys TOWLINE_SOAK_STANDBYS=100 ;;
#: restores: 1,000 instant restores of a small guest, each half of them with a preempt channel (TOWLINE_SOAK_RESTORES: of each)
restores)
  lab postcopy restores::a_guest_runs_at_once_and_gets_each_page_once TOWLINE_SOAK_RESTORES=500
  lab postcopy restores::a_guest_with_a_preempt_channel_and_its_working_set_gets_each_page_once
  ;;
#: cuts: 100 connections cut at random moments while a guest's memory follows it (TOWLINE_SOAK_CUTS, TOWLINE_SOAK_SEED)
cuts) lab postcopy cuts::a_postcopy_cut_at_random_moments_is_recovered TOWLINE_SOAK_CUTS=100 ;;
#: standstill: how long a guest with 96 MiB of data (TOWLINE_SOAK_STANDSTILL_MIB) is stopped to be saved: at 1, 5, 50 MB/s, to a file, to
#:   a slow disk
standstill) lab store standstill::a_guest_saved_over_a_slow_link_keeps_its_downtime_limit TOWLINE_SOAK_STANDSTILL_MIB=96 ;;
#: instant-store: an instant restore out of an object store of a Linux with 512 MiB of data: towline's memory (TOWLINE_SOAK_STORE_MIB)
instant-store) lab store guests::a_guest_in_a_store_runs_at_once_and_what_it_waits_for_comes_first TOWLINE_SOAK_STORE_MIB=512 ;;
#: uploads: 50 uploads into a store that are killed at random moments (TOWLINE_SOAK_UPLOADS, TOWLINE_SOAK_SEED)
uploads) lab store kills::an_upload_that_is_killed_leaves_no_index_that_names_a_missing_chunk TOWLINE_SOAK_UPLOADS=50 ;;
#: store-leases: 100,000 orders of uploads, readers and collections on a model of a store, others with TOWLINE_SEEDS; then how soon each
#:   fault that was mended is found
store-leases)
  default TOWLINE_SEEDS=100000
  TOWLINE_FIND_FAULTS=all crate image --release --features store --lib -- store::simulation
  ;;
#: image-flips: 100,000 bits that flip in the files of a chain: each is found or changes nothing (TOWLINE_SOAK_FLIPS, TOWLINE_SOAK_SEED)
image-flips)
  default TOWLINE_SOAK_FLIPS=100000
  crate image --features store --lib -- --exact flip_tests::bits_at_random
  ;;
#: image-crashes: crashes, failures and crashes after crashes at every step of every writer of images, 5 rounds (TOWLINE_SOAK_CRASHES)
image-crashes)
  default TOWLINE_SOAK_CRASHES=5
  crate image --features store --lib -- --exact crash_tests::crashes_of_writers_after_crashes
  ;;
#: vhost-fuzz: 10 million rings and messages of hostile guests and frontends, and 200,000 conversations
vhost-fuzz)
  fuzz 10000000 vhost_ring vhost_message
  fuzz 200000 vhost_session
  ;;
#: net-device: an hour of hostile guests and frontends against a network card (TOWLINE_SECONDS, TOWLINE_SEEDS, TOWLINE_FIRST_SEED)
net-device)
  default TOWLINE_SECONDS=3600 TOWLINE_SEEDS=100000000
  crate net --test hostile --
  ;;
#: net-pairs: every pair of network cards that differ: the verdict against the result of a move
net-pairs) lab net pairs::verdicts_on_cards_agree_with_what_happens TOWLINE_SOAK_NET_PAIRS=1 ;;
#: net-moves: 50 moves in a row of one guest that talks through towline's network card (TOWLINE_SOAK_NET_MOVES)
net-moves) lab net moves::a_guest_that_talks_moves_between_hosts TOWLINE_SOAK_NET_MOVES=50 ;;
#: net-pauses: 50 moves of one guest to and fro between two hosts, whose numbered datagrams are counted (TOWLINE_SOAK_PAUSES)
net-pauses) lab net pauses::frames_of_several_queues_are_not_lost_by_a_move TOWLINE_SOAK_PAUSES=50 ;;
#: net-ring-restarts: 20 moves of a guest under inbound bulk whose card restarts its rings ten times in each
#:   (TOWLINE_SOAK_NET_RESTARTED_MOVES)
net-ring-restarts) lab net moves::every_byte_arrives_while_the_rings_restart_during_moves TOWLINE_SOAK_NET_RESTARTED_MOVES=20 ;;
#: net-restarts: twice 100 deaths of the network card's process while its guest talks (TOWLINE_SOAK_NET_RESTARTS)
net-restarts) lab net restarts::connections_survive_the_death_of_the_cards_process TOWLINE_SOAK_NET_RESTARTS=100 ;;
#: net-testpmd: DPDK's driver swaps frames on four queues for a minute each way (TOWLINE_SOAK_TESTPMD_SECONDS)
net-testpmd) lab net testpmd::another_driver_gets_and_sends_back_every_frame TOWLINE_SOAK_TESTPMD_SECONDS=60 ;;
#: net-traffic: through the network card: every kind of packet, 1 GiB each way (TOWLINE_SOAK_NET_MIB), 10,000 connections
#:   (TOWLINE_SOAK_NET_CONNECTIONS); streams for 120 s (TOWLINE_SOAK_NET_SECONDS), and while a capture is suspended for 60 s
#:   (TOWLINE_SOAK_NET_SUSPENDED_S)
net-traffic)
  lab net traffic::every_kind_of_packet_goes_both_ways TOWLINE_SOAK_NET_CONNECTIONS=10000 TOWLINE_SOAK_NET_MIB=1024
  lab net traffic::a_guests_settings_change_while_it_sends TOWLINE_SOAK_NET_SECONDS=120 TOWLINE_SOAK_NET_SUSPENDED_S=60
  ;;
#: net-zero-copy: streams by AF_XDP with zero-copy for 120 s while scatter-gather, queues and rings change (TOWLINE_SOAK_XDP_SECONDS), and
#:   while a capture is suspended for 60 s (TOWLINE_SOAK_XDP_SUSPENDED_S)
net-zero-copy)
  lab net zero_copy::stress::streams_survive_changes_meanwhile TOWLINE_SOAK_XDP_SECONDS=120 TOWLINE_SOAK_XDP_SUSPENDED_S=60
  ;;
#: net-plugs: 20 times a second network card comes and goes under traffic (TOWLINE_SOAK_NET_PLUGS)
net-plugs) lab net queues::a_card_comes_and_goes_while_another_one_talks TOWLINE_SOAK_NET_PLUGS=20 ;;
#: vsock: 100,000 schedules of vsock connections in virtual time, others with TOWLINE_SEEDS
vsock)
  default TOWLINE_SEEDS=100000
  crate vsock --release --test simulation --
  ;;
#: vsock-fuzz: 2 million inputs of hostile guests, clients and peers of two vsock devices
vsock-fuzz)
  fuzz 2000000 vsock_device
  fuzz 10000000 vsock_packet
  ;;
#: vsock-neighbours: sixteen guests of one process, three of them hostile: what the others get (TOWLINE_SOAK_NEIGHBOURS: pairs of turns)
vsock-neighbours)
  default TOWLINE_SOAK_NEIGHBOURS=20 TOWLINE_SOAK_NEIGHBOURS_MS=1000
  crate vsock --release --test neighbours --
  ;;
#: vsock-bytes: 100 MiB each way through a Linux guest's vsock (TOWLINE_SOAK_VSOCK_MIB)
vsock-bytes) lab vsock a_guest_of_qemu_10_0 TOWLINE_SOAK_VSOCK_MIB=100 ;;
#: vsock-stalls: an hour of connections with a Linux guest whose ends stall at random, and the device's memory
#:   (TOWLINE_SOAK_VSOCK_STALLS_S)
vsock-stalls) lab vsock a_guest_of_qemu_10_0 TOWLINE_SOAK_VSOCK_STALLS_S=3600 ;;
#: vsock-kernel: the kernel's own tests of vsock between two guests, and vsock_perf with 100 MiB (TOWLINE_SOAK_VSOCK_KERNEL_MIB); builds
#:   them first
vsock-kernel)
  xtask/setup.sh vsock-tests
  lab vsock kernel::the_kernels_own_tests_pass_between_two_guests TOWLINE_SOAK_VSOCK_KERNEL_MIB=100
  ;;
#: roots: the package in fresh roots of Debian 12 and 13: installed, README's first steps pasted, removed; the steps of Containerfile (as
#:   root; TOWLINE_SOAK_DEBUG: of the debug build)
roots) xtask/roots.sh package ;;
#: debian-13-demo: make demo from a clone of the last commit in a root of Debian 13, with this machine's Rust (as root)
debian-13-demo) xtask/roots.sh demo ;;
#: debian-13-test: make test there (as root)
debian-13-test) xtask/roots.sh test ;;
#: lintian: Debian's checks of the package: no error and no warning (TOWLINE_SOAK_DEBUG: of the debug build)
lintian) xtask/roots.sh lintian ;;
#: report-browser: pages of --report in a headless chromium, light, dark and narrow: pictures to look at in target/report-browser
report-browser) xtask/browser.sh ;;
#: nightly: all of these but what makes roots or needs a browser, one after another; those that fail are named at the end
nightly)
  failed=()
  for name in $(sed -n 's/^#: \([a-z0-9-]*\):.*/\1/p' xtask/soak.sh); do
    [[ $name != roots ]] || break
    echo "== long run: $name"
    xtask/soak.sh "$name" || failed+=("$name")
  done
  [[ ! ${failed[*]} ]] || { echo "long runs that failed: ${failed[*]}" >&2; exit 1; }
  ;;
*)
  [[ ! ${1-} ]] || echo "no long run is called \`$1\`"
  echo "the long runs:"
  sed -n 's/^#://p' xtask/soak.sh
  [[ ! ${1-} ]] || exit 1
  ;;
esac
