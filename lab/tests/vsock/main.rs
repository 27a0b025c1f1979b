//! Guests of stock QEMUs with our vsock device: their kernel's vsock, with `socat` and Perl as their
//! programs.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod guests;
mod kernel;
mod messages;
mod peers_defects;
mod ssh;
mod stalls;
mod streams;
mod support;
mod watched;

use towline_lab::{Kernel, Version, require_kernel, require_lab, require_qemu, skip};

use support::Fixture;

/// All tests of one guest, one after the other: booting it takes longer than most of them.
fn all_of(version: Version, kernel: Kernel) {
    let tcp_port = stalls::free_port();
    let rule = format!("tcp:127.0.0.1:{tcp_port}=guest:5001");
    let mut fixture = Fixture::with_kernel(version, kernel, &["--forward", &rule]);
    fixture.perl("echo", "listen stream 5001 echo");
    peers_defects::other_backends_defects(&mut fixture);
    streams::bytes_go_both_ways(&mut fixture);
    streams::many_connections_and_half_closed_ones(&mut fixture);
    stalls::stalls_lose_no_bytes(&mut fixture, tcp_port);
    if messages::keep_boundaries(&mut fixture) {
        messages::short_ones_reach_a_late_reader(&mut fixture);
    }
    streams::a_death_is_seen_at_the_other_end(&mut fixture);
    assert!(fixture.device.runs().unwrap());
}

#[test]
fn a_guest_of_qemu_10_0() {
    if require_lab("a_guest_of_qemu_10_0") {
        all_of(Version::V10_0, Kernel::Debian12);
    }
}

#[test]
#[ignore = "nightly"]
fn a_guest_of_qemu_7_2() {
    if require_lab("a_guest_of_qemu_7_2") {
        all_of(Version::V7_2, Kernel::Debian12);
    }
}

#[test]
#[ignore = "nightly"]
fn short_messages_reach_a_late_reader_in_linux_7() {
    let name = "short_messages_reach_a_late_reader_in_linux_7";
    if require_qemu(name, &[Version::Newest]) && require_kernel(name, Kernel::Newest) {
        messages::short_ones_reach_a_late_reader(&mut Fixture::with_kernel(
            Version::Newest,
            Kernel::Newest,
            &[],
        ));
    }
}

/// Part of `cargo xtask soak versions`.
#[test]
fn a_linux_7_of_the_newest_qemu() {
    let name = "a_linux_7_of_the_newest_qemu";
    if std::env::var_os("TOWLINE_SOAK_VERSIONS").is_none() {
        skip(name, "it is a part of `cargo xtask soak versions`");
    } else if require_qemu(name, &[Version::Newest]) && require_kernel(name, Kernel::Newest) {
        all_of(Version::Newest, Kernel::Newest);
    }
}
