//! `cargo xtask soak NAME`: the long runs, by name.
//!
//! `make test` runs short counts; these are the thousand-fold and hour-long ones, run before a release is made.

mod browser;
mod container;
mod host;
mod lintian;
mod roots;

use std::time::Duration;

use anyhow::{Result, bail};

use crate::command::{cargo, run as run_command, target_directory};
use crate::setup::vsock_tests;
use crate::test::fuzz;

struct Soak {
    name: &'static str,
    about: &'static str,
    run: fn() -> Result<()>,
}

/// Inputs for each target; a conversation starts threads.
const VHOST_FUZZ: [(&str, u64); 3] =
    [("vhost_ring", 10_000_000), ("vhost_message", 10_000_000), ("vhost_session", 200_000)];
const VSOCK_FUZZ: [(&str, u64); 2] = [("vsock_device", 2_000_000), ("vsock_packet", 10_000_000)];
const VHOST_FUZZ_WITHIN: Duration = Duration::from_secs(3600);

const SOAKS: &[Soak] = &[
    Soak {
        name: "rss",
        about: "memory that towline takes to save and restore a guest of 4 GiB",
        run: || {
            lab_test("matrix", "footprint::a_copy_takes_little_memory", &[("TOWLINE_SOAK_RSS_MIB", "4096")])
        },
    },
    Soak {
        name: "simulation",
        about: "100,000 migrations in virtual time, others with TOWLINE_SEEDS, and cuts at every byte",
        run: simulation,
    },
    Soak {
        name: "switchover-model",
        about: "every order of events of a switchover with eight mishaps in a run (TOWLINE_MODEL_MISHAPS): worlds, depth, time",
        run: switchover_model,
    },
    Soak {
        name: "vsock",
        about: "100,000 schedules of vsock connections in virtual time, others with TOWLINE_SEEDS",
        run: vsock,
    },
    Soak {
        name: "vsock-fuzz",
        about: "2 million inputs of hostile guests, clients and peers of two vsock devices",
        run: || fuzz::long(&VSOCK_FUZZ, VHOST_FUZZ_WITHIN),
    },
    Soak {
        name: "vsock-neighbours",
        about: "sixteen guests of one process, three of them hostile: what the others get (TOWLINE_SOAK_NEIGHBOURS: pairs of turns)",
        run: vsock_neighbours,
    },
    Soak {
        name: "net-device",
        about: "an hour of hostile guests and frontends against a network card (TOWLINE_SECONDS, TOWLINE_SEEDS, TOWLINE_FIRST_SEED)",
        run: net_device,
    },
    Soak {
        name: "vsock-bytes",
        about: "100 MiB each way through a Linux guest's vsock (TOWLINE_SOAK_VSOCK_MIB)",
        run: || lab_test("vsock", "a_guest_of_qemu_10_0", &[("TOWLINE_SOAK_VSOCK_MIB", "100")]),
    },
    Soak {
        name: "vsock-stalls",
        about: "an hour of connections with a Linux guest whose ends stall at random, and the device's memory \
            (TOWLINE_SOAK_VSOCK_STALLS_S)",
        run: || lab_test("vsock", "a_guest_of_qemu_10_0", &[("TOWLINE_SOAK_VSOCK_STALLS_S", "3600")]),
    },
    Soak {
        name: "vsock-kernel",
        about: "the kernel's own tests of vsock between two guests, and vsock_perf with 100 MiB (TOWLINE_SOAK_VSOCK_KERNEL_MIB); \
            builds them first",
        run: || {
            vsock_tests::run()?;
            lab_test(
                "vsock",
                "kernel::the_kernels_own_tests_pass_between_two_guests",
                &[("TOWLINE_SOAK_VSOCK_KERNEL_MIB", "100")],
            )
        },
    },
    Soak {
        name: "kills",
        about: "200 moves in which a QEMU, towline or a connection is killed (TOWLINE_SOAK_KILLS, TOWLINE_SOAK_SEED)",
        run: || lab_test("live", "kills::no_guest_is_lost_or_runs_twice", &[("TOWLINE_SOAK_KILLS", "200")]),
    },
    Soak {
        name: "upgrade-kills",
        about: "200 upgrades in which a QEMU or towline is killed, and 20 in which the process of the guest's card is \
            (TOWLINE_UPGRADE_KILLS, TOWLINE_UPGRADE_CARD_KILLS, TOWLINE_UPGRADE_SEED)",
        run: || {
            lab_test(
                "upgrade",
                "kills::a_kill_at_any_moment_leaves_one_guest",
                &[("TOWLINE_UPGRADE_KILLS", "200")],
            )?;
            lab_test(
                "upgrade",
                "cards::a_card_that_is_killed_at_any_moment_returns_to_the_one_guest",
                &[("TOWLINE_UPGRADE_CARD_KILLS", "20")],
            )
        },
    },
    Soak {
        name: "upgrades",
        about: "100 upgrades in a row under a load: the guest's downtime, bytes moved (TOWLINE_UPGRADES, sizes: TOWLINE_UPGRADE_MIB=512,1024)",
        run: || {
            lab_test(
                "upgrade",
                "series::upgrades_in_a_row_under_a_load_lose_nothing",
                &[("TOWLINE_UPGRADES", "100")],
            )?;
            for test in ["guests_in_memfds_of_7_2_have_a_short_downtime", "guests_in_memfds_of_10_0_continue"]
            {
                lab_test("upgrade", &format!("series::{test}"), &[("TOWLINE_UPGRADES", "100")])?;
            }
            Ok(())
        },
    },
    Soak {
        name: "upgrades-cards",
        about: "100 upgrades in a row of a guest whose card is in traffic: its downtime, the longest gap of frames, every byte compared \
            (TOWLINE_UPGRADES, TOWLINE_UPGRADE_MIB)",
        run: || {
            lab_test(
                "upgrade",
                "cards::connections_of_a_card_survive_in_another_qemu",
                &[("TOWLINE_UPGRADES", "100")],
            )
        },
    },
    Soak {
        name: "upgrades-cpr",
        about: "20 times QEMU's own cpr-transfer, and 20 upgrades, of one small guest: their downtime (TOWLINE_UPGRADES)",
        run: || {
            lab_test("upgrade", "cpr::qemus_own_transfer_beside_an_upgrade", &[("TOWLINE_UPGRADES", "20")])
        },
    },
    Soak {
        name: "upgrade-boundaries",
        about: "memory after a load that is given up behind each section of the device state",
        run: || {
            lab_test(
                "upgrade",
                "aborted::memory_is_bit_equal_after_a_load_that_is_given_up_at_any_section",
                &[("TOWLINE_UPGRADE_BOUNDARIES", "0")],
            )
        },
    },
    Soak {
        name: "chaos",
        about: "2,000 copies of every kind with a fault of any kind at any moment (TOWLINE_CHAOS_RUNS, TOWLINE_CHAOS_SEED, TOWLINE_CHAOS_JOBS); \
            goes on where it was stopped, by the journal target/chaos.journal (TOWLINE_CHAOS_JOURNAL)",
        run: chaos,
    },
    Soak {
        name: "clones",
        about: "eight guests of 512 MiB out of one image at once: times, and towline's memory (TOWLINE_SOAK_CLONES_MIB)",
        run: || {
            lab_test(
                "images",
                "clones::eight_guests_are_restored_from_one_image_at_once",
                &[("TOWLINE_SOAK_CLONES_MIB", "512")],
            )
        },
    },
    Soak {
        name: "run-clones",
        about: "100 guests of 512 MiB by one `towline run` (TOWLINE_SOAK_RUN_CLONES): times and memory; that they run on for a time, and the \
            image afterwards (TOWLINE_SOAK_RUN_SECONDS); beside 30 with memory of their own (TOWLINE_SOAK_RUN_COPIES)",
        run: || {
            lab_test(
                "run",
                "many::clones_share_the_memory_of_their_image",
                &[("TOWLINE_SOAK_RUN_CLONES", "100"), ("TOWLINE_SOAK_RUN_SECONDS", "600")],
            )?;
            lab_test("run", "many::clones_with_memory_of_their_own_run", &[("TOWLINE_SOAK_RUN_COPIES", "30")])
        },
    },
    Soak {
        name: "run-stores",
        about: "20 times `towline run` of an image in a store behind a delay, at once, by a file of the host and by one that is there: \
            times to the first tick (TOWLINE_SOAK_STORE_RUNS)",
        run: || {
            lab_test(
                "run",
                "stores::guests_of_a_slow_store_run_at_once_or_from_a_file_of_the_host",
                &[("TOWLINE_SOAK_STORE_RUNS", "20")],
            )
        },
    },
    Soak {
        name: "restores",
        about: "1,000 instant restores of a small guest, each half of them with a preempt channel (TOWLINE_SOAK_RESTORES: of each)",
        run: || {
            for test in [
                "restores::a_guest_runs_at_once_and_gets_each_page_once",
                "restores::a_guest_with_a_preempt_channel_and_its_working_set_gets_each_page_once",
            ] {
                lab_test("postcopy", test, &[("TOWLINE_SOAK_RESTORES", "500")])?;
            }
            Ok(())
        },
    },
    Soak {
        name: "cuts",
        about: "100 connections cut at random moments while a guest's memory follows it (TOWLINE_SOAK_CUTS, TOWLINE_SOAK_SEED)",
        run: || {
            lab_test(
                "postcopy",
                "cuts::a_postcopy_cut_at_random_moments_is_recovered",
                &[("TOWLINE_SOAK_CUTS", "100")],
            )
        },
    },
    Soak {
        name: "standstill",
        about: "how long a guest with 96 MiB of data (TOWLINE_SOAK_STANDSTILL_MIB) is stopped to be saved: at 1, 5, 50 MB/s, to a file, to \
            a slow disk",
        run: || {
            lab_test(
                "store",
                "standstill::a_guest_saved_over_a_slow_link_keeps_its_downtime_limit",
                &[("TOWLINE_SOAK_STANDSTILL_MIB", "96")],
            )
        },
    },
    Soak {
        name: "instant-clones",
        about: "the same with --postcopy: each runs at once",
        run: || {
            lab_test(
                "images",
                "clones::eight_guests_run_at_once_and_their_memory_follows",
                &[("TOWLINE_SOAK_CLONES_MIB", "512")],
            )
        },
    },
    Soak {
        name: "pairs",
        about: "every pair of QEMUs that differ: the verdict against a migration by QEMU itself and a move (TOWLINE_PAIR: only one)",
        run: || {
            let all = [("TOWLINE_SOAK_PAIRS", "1")];
            lab_test("pairs", "verdicts_agree_with_what_happens", &all)?;
            lab_test("pairs", "verdicts_on_the_newest_qemu_agree_with_what_happens", &all)
        },
    },
    Soak {
        name: "versions",
        about: "each QEMU with the newest one (11.1), in every way that a guest can go, and Linux 7 with a vsock (TOWLINE_CROSSING: only \
            those whose name has this)",
        run: || {
            let all = [("TOWLINE_SOAK_VERSIONS", "1")];
            lab_test("matrix", "crossings::guests_cross_from_version_to_version", &all)?;
            lab_test("tls", "the_newest_qemu_and_each_other_one", &all)?;
            lab_test("vsock", "a_linux_7_of_the_newest_qemu", &all)
        },
    },
    Soak {
        name: "net-pairs",
        about: "every pair of network cards that differ: the verdict against the result of a move",
        run: || {
            lab_test(
                "net",
                "pairs::verdicts_on_cards_agree_with_what_happens",
                &[("TOWLINE_SOAK_NET_PAIRS", "1")],
            )
        },
    },
    Soak {
        name: "qmp-latency",
        about: "how long query-migrate takes while 4 GiB move at full rate (TOWLINE_SOAK_LATENCY_MIB)",
        run: || {
            lab_test(
                "control",
                "latency::queries_are_answered_while_memory_moves",
                &[("TOWLINE_SOAK_LATENCY_MIB", "4096")],
            )
        },
    },
    Soak {
        name: "moves",
        about: "50 moves in a row of one Linux guest that writes its memory (TOWLINE_SOAK_MOVES)",
        run: || {
            lab_test(
                "live",
                "moves::a_busy_linux_continues_at_its_destination",
                &[("TOWLINE_SOAK_MOVES", "50")],
            )
        },
    },
    Soak {
        name: "vhost-fuzz",
        about: "10 million rings and messages of hostile guests and frontends, and 200,000 conversations",
        run: || fuzz::long(&VHOST_FUZZ, VHOST_FUZZ_WITHIN),
    },
    Soak {
        name: "net-ring-restarts",
        about: "20 moves of a guest under inbound bulk whose card restarts its rings ten times in each (TOWLINE_SOAK_NET_RESTARTED_MOVES)",
        run: || {
            lab_test(
                "net",
                "moves::every_byte_arrives_while_the_rings_restart_during_moves",
                &[("TOWLINE_SOAK_NET_RESTARTED_MOVES", "20")],
            )
        },
    },
    Soak {
        name: "net-moves",
        about: "50 moves in a row of one guest that talks through towline's network card (TOWLINE_SOAK_NET_MOVES)",
        run: || {
            lab_test(
                "net",
                "moves::a_guest_that_talks_moves_between_hosts",
                &[("TOWLINE_SOAK_NET_MOVES", "50")],
            )
        },
    },
    Soak {
        name: "net-restarts",
        about: "twice 100 deaths of the network card's process while its guest talks (TOWLINE_SOAK_NET_RESTARTS)",
        run: || {
            lab_test(
                "net",
                "restarts::connections_survive_the_death_of_the_cards_process",
                &[("TOWLINE_SOAK_NET_RESTARTS", "100")],
            )
        },
    },
    Soak {
        name: "net-testpmd",
        about: "DPDK's driver swaps frames on four queues for a minute each way (TOWLINE_SOAK_TESTPMD_SECONDS)",
        run: || {
            lab_test(
                "net",
                "testpmd::another_driver_gets_and_sends_back_every_frame",
                &[("TOWLINE_SOAK_TESTPMD_SECONDS", "60")],
            )
        },
    },
    Soak {
        name: "net-traffic",
        about: "through the network card: every kind of packet, 1 GiB each way (TOWLINE_SOAK_NET_MIB), 10,000 connections \
            (TOWLINE_SOAK_NET_CONNECTIONS); streams for 120 s (TOWLINE_SOAK_NET_SECONDS), and while a capture is suspended for \
            60 s (TOWLINE_SOAK_NET_SUSPENDED_S)",
        run: || {
            lab_test(
                "net",
                "traffic::every_kind_of_packet_goes_both_ways",
                &[("TOWLINE_SOAK_NET_CONNECTIONS", "10000"), ("TOWLINE_SOAK_NET_MIB", "1024")],
            )?;
            lab_test(
                "net",
                "traffic::a_guests_settings_change_while_it_sends",
                &[("TOWLINE_SOAK_NET_SECONDS", "120"), ("TOWLINE_SOAK_NET_SUSPENDED_S", "60")],
            )
        },
    },
    Soak {
        name: "net-zero-copy",
        about: "streams by AF_XDP with zero-copy for 120 s while scatter-gather, queues and rings change (TOWLINE_SOAK_XDP_SECONDS), \
            and while a capture is suspended for 60 s (TOWLINE_SOAK_XDP_SUSPENDED_S)",
        run: || {
            lab_test(
                "net",
                "zero_copy::stress::streams_survive_changes_meanwhile",
                &[("TOWLINE_SOAK_XDP_SECONDS", "120"), ("TOWLINE_SOAK_XDP_SUSPENDED_S", "60")],
            )
        },
    },
    Soak {
        name: "net-plugs",
        about: "20 times a second network card comes and goes under traffic (TOWLINE_SOAK_NET_PLUGS)",
        run: || {
            lab_test(
                "net",
                "queues::a_card_comes_and_goes_while_another_one_talks",
                &[("TOWLINE_SOAK_NET_PLUGS", "20")],
            )
        },
    },
    Soak {
        name: "instant-store",
        about: "an instant restore out of an object store of a Linux with 512 MiB of data: towline's memory (TOWLINE_SOAK_STORE_MIB)",
        run: || {
            lab_test(
                "store",
                "guests::a_guest_in_a_store_runs_at_once_and_what_it_waits_for_comes_first",
                &[("TOWLINE_SOAK_STORE_MIB", "512")],
            )
        },
    },
    Soak {
        name: "image-flips",
        about: "100,000 bits that flip in the files of a chain: each is found or changes nothing (TOWLINE_SOAK_FLIPS, TOWLINE_SOAK_SEED)",
        run: || image_test("flip_tests::bits_at_random", "TOWLINE_SOAK_FLIPS", "100000"),
    },
    Soak {
        name: "image-crashes",
        about: "crashes, failures and crashes after crashes at every step of every writer of images, 5 rounds (TOWLINE_SOAK_CRASHES)",
        run: || image_test("crash_tests::crashes_of_writers_after_crashes", "TOWLINE_SOAK_CRASHES", "5"),
    },
    Soak {
        name: "uploads",
        about: "50 uploads into a store that are killed at random moments (TOWLINE_SOAK_UPLOADS, TOWLINE_SOAK_SEED)",
        run: || {
            lab_test(
                "store",
                "kills::an_upload_that_is_killed_leaves_no_index_that_names_a_missing_chunk",
                &[("TOWLINE_SOAK_UPLOADS", "50")],
            )
        },
    },
    Soak {
        name: "store-leases",
        about: "100,000 orders of uploads, readers and collections on a model of a store, others with TOWLINE_SEEDS; then how soon each \
            fault that was mended is found",
        run: store_leases,
    },
    Soak {
        name: "roots",
        about: "the package in fresh roots of Debian 12 and 13: installed, README's first steps pasted, removed (as root; \
            TOWLINE_SOAK_DEBUG: of the debug build)",
        run: roots::run,
    },
    Soak {
        name: "debian-13-demo",
        about: "make demo from a clone of the last commit in a root of Debian 13, with this machine's Rust (as root)",
        run: || host::run("demo"),
    },
    Soak { name: "debian-13-test", about: "make test there (as root)", run: || host::run("test") },
    Soak {
        name: "lintian",
        about: "Debian's checks of the package: no error and no warning (TOWLINE_SOAK_DEBUG: of the debug build)",
        run: lintian::run,
    },
    Soak {
        name: "report-browser",
        about: "pages of --report in a headless chromium, light, dark and narrow: pictures to look at in target/report-browser",
        run: browser::run,
    },
];

/// Runs the named one; without a name, lists them.
pub(crate) fn run(name: Option<&str>) -> Result<()> {
    let Some(name) = name else {
        println!("{}", listing());
        return Ok(());
    };
    match SOAKS.iter().find(|soak| soak.name == name) {
        Some(soak) => (soak.run)(),
        None => bail!("no long run is called `{name}`; {}", listing()),
    }
}

/// Runs one test of the lab, which looks at these variables for how long to be, on the release build. What is set already
/// stays so.
fn lab_test(target: &str, name: &str, variables: &[(&str, &str)]) -> Result<()> {
    run_command(&mut cargo(["build", "--release", "--package", "towline-cli"]))?;
    let mut command = cargo(["test", "--package", "towline-lab", "--test", target, "--"]);
    command.args(["--exact", name, "--nocapture"]);
    command.env("TOWLINE_BIN", target_directory()?.join("release/towline"));
    let unset = variables.iter().filter(|(name, _)| std::env::var_os(name).is_none());
    run_command(command.envs(unset.copied()))
}

/// Faults at random, with a journal from which it resumes.
fn chaos() -> Result<()> {
    let journal = target_directory()?.join("chaos.journal");
    let variables = [("TOWLINE_CHAOS_RUNS", "2000"), ("TOWLINE_CHAOS_JOURNAL", &journal.to_string_lossy())];
    lab_test("chaos", "no_fault_costs_a_guest_or_runs_two", &variables)
}

/// The search of the switchover's machine: `TOWLINE_MODEL_MISHAPS` says how deep.
fn switchover_model() -> Result<()> {
    let mut command = cargo(["test", "--package", "towline-control", "--lib", "--"]);
    command.args(["--nocapture", "--test-threads", "1", "switchover::model"]);
    if std::env::var_os("TOWLINE_MODEL_MISHAPS").is_none() {
        command.env("TOWLINE_MODEL_MISHAPS", "8");
    }
    run_command(&mut command)
}

/// Migrations in virtual time: `TOWLINE_SEEDS` says how many, and a cut at every byte of some.
fn simulation() -> Result<()> {
    let mut command =
        cargo(["test", "--release", "--package", "towline-migration", "--test", "simulation", "--"]);
    command.arg("--nocapture");
    if std::env::var_os("TOWLINE_SEEDS").is_none() {
        command.env("TOWLINE_SEEDS", "100000");
    }
    run_command(command.env("TOWLINE_CUT_STEP", "1"))
}

/// One test of images, whose variable says how long to be; the tests' own build has optimised what hashes.
fn image_test(name: &str, variable: &str, value: &str) -> Result<()> {
    let mut command = cargo(["test", "--package", "towline-image", "--features", "store", "--lib", "--"]);
    command.args(["--exact", name, "--nocapture"]);
    if std::env::var_os(variable).is_none() {
        command.env(variable, value);
    }
    run_command(&mut command)
}

/// Schedules of vsock connections: `TOWLINE_SEEDS` says how many.
fn vsock_neighbours() -> Result<()> {
    let mut command =
        cargo(["test", "--release", "--package", "towline-vsock", "--test", "neighbours", "--"]);
    command.arg("--nocapture");
    for (name, value) in [("TOWLINE_SOAK_NEIGHBOURS", "20"), ("TOWLINE_SOAK_NEIGHBOURS_MS", "1000")] {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    run_command(&mut command)
}

fn vsock() -> Result<()> {
    let mut command =
        cargo(["test", "--release", "--package", "towline-vsock", "--test", "simulation", "--"]);
    command.arg("--nocapture");
    if std::env::var_os("TOWLINE_SEEDS").is_none() {
        command.env("TOWLINE_SEEDS", "100000");
    }
    run_command(&mut command)
}

/// Uploads, readers and collections in simulated time: `TOWLINE_SEEDS` says how many.
fn store_leases() -> Result<()> {
    let mut command =
        cargo(["test", "--release", "--package", "towline-image", "--features", "store", "--lib"]);
    command.args(["--", "--nocapture", "store::simulation"]);
    if std::env::var_os("TOWLINE_SEEDS").is_none() {
        command.env("TOWLINE_SEEDS", "100000");
    }
    run_command(command.env("TOWLINE_FIND_FAULTS", "all"))
}

/// Hostile inputs for the network card: `TOWLINE_SECONDS` says for how long.
fn net_device() -> Result<()> {
    let mut command = cargo(["test", "--package", "towline-net", "--test", "hostile", "--"]);
    command.arg("--nocapture");
    let long = [("TOWLINE_SECONDS", "3600"), ("TOWLINE_SEEDS", "100000000")];
    let unset = long.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    run_command(command.envs(unset))
}

fn listing() -> String {
    let lines: Vec<_> = SOAKS.iter().map(|soak| format!("  {:<24} {}", soak.name, soak.about)).collect();
    format!("the long runs:\n{}", lines.join("\n"))
}
