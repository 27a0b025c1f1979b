//! `cargo xtask soak NAME`: the long runs, by name.
//!
//! `make test` runs short counts; these are the thousand-fold and hour-long ones, run before a release is made.

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
        name: "vsock",
        about: "100,000 schedules of vsock connections in virtual time, others with TOWLINE_SEEDS",
        run: vsock,
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
                "clones::eight_guests_come_of_one_image_at_once",
                &[("TOWLINE_SOAK_CLONES_MIB", "512")],
            )
        },
    },
    Soak {
        name: "restores",
        about: "1,000 instant restores of a small guest, each half of them with a preempt channel (TOWLINE_SOAK_RESTORES: of each)",
        run: || {
            for test in [
                "restores::a_guest_runs_at_once_and_gets_each_page_once",
                "restores::and_with_a_preempt_channel_and_its_working_set_ahead",
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
                "cuts::cut_at_random_moments_it_is_recovered",
                &[("TOWLINE_SOAK_CUTS", "100")],
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
        run: || lab_test("pairs", "verdicts_agree_with_what_happens", &[("TOWLINE_SOAK_PAIRS", "1")]),
    },
    Soak {
        name: "net-pairs",
        about: "every pair of network cards that differ: the verdict against what becomes of a guest that is moved",
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
                "latency::questions_are_answered_while_memory_moves",
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
                "moves::a_busy_linux_goes_on_at_its_destination",
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
        name: "net-upgrades",
        about: "100 times another process takes the network card over while its guest talks (TOWLINE_SOAK_NET_UPGRADES)",
        run: || {
            lab_test(
                "net",
                "restarts::another_process_takes_over_and_the_guest_notices_nothing",
                &[("TOWLINE_SOAK_NET_UPGRADES", "100")],
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
            (TOWLINE_SOAK_NET_CONNECTIONS); streams for 120 s (TOWLINE_SOAK_NET_SECONDS), and while a capture stands still for \
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

/// Faults at random, with a journal by which it goes on.
fn chaos() -> Result<()> {
    let journal = target_directory()?.join("chaos.journal");
    let variables = [("TOWLINE_CHAOS_RUNS", "2000"), ("TOWLINE_CHAOS_JOURNAL", &journal.to_string_lossy())];
    lab_test("chaos", "no_fault_costs_a_guest_or_runs_two", &variables)
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

/// Schedules of vsock connections: `TOWLINE_SEEDS` says how many.
fn vsock() -> Result<()> {
    let mut command =
        cargo(["test", "--release", "--package", "towline-vsock", "--test", "simulation", "--"]);
    command.arg("--nocapture");
    if std::env::var_os("TOWLINE_SEEDS").is_none() {
        command.env("TOWLINE_SEEDS", "100000");
    }
    run_command(&mut command)
}

fn listing() -> String {
    let lines: Vec<_> = SOAKS.iter().map(|soak| format!("  {:<24} {}", soak.name, soak.about)).collect();
    format!("the long runs:\n{}", lines.join("\n"))
}
