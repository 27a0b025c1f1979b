//! The session ends, or a process of a move is killed, at any moment.

use rustix::process::Signal;
use towline_lab::expect::wait_event;
use towline_lab::{child, signal};

use crate::support::{Hosts, MIB, WITHIN, last};

/// Slow enough for a signal in the transfer.
const SLOW: [&str; 5] = ["--json", "--max-bandwidth", "4M", "--peer-timeout", "3"];

#[test]
fn a_move_whose_session_or_user_ends_it_leaves_the_guest_where_it_is() {
    let Some(mut hosts) = Hosts::new("a_move_whose_session_or_user_ends_it_leaves_the_guest_where_it_is")
    else {
        return;
    };
    let start = hosts.start_options();
    let options: Vec<&str> = start.iter().map(String::as_str).chain(SLOW).collect();
    for kill in ["agent, at once", "ssh", "towline", "agent", "user"] {
        let mut moving = hosts.start("move", "/web", &options);
        // QEMU 10.0 may never clean up a migration whose connections break in their first moment.
        wait_event(&mut moving, "the transfer", WITHIN, |event| {
            event["ram"]["transferred"].as_u64() >= Some(MIB)
        });
        // nsenter is replaced by towline.
        match kill {
            "ssh" => signal(child(moving.pid(), "ssh").unwrap(), Signal::KILL),
            "towline" => signal(moving.pid(), Signal::KILL),
            "user" => signal(moving.pid(), Signal::INT),
            "agent, at once" => signal(hosts.there.agent().unwrap(), Signal::KILL),
            _ => signal(hosts.there.agent().unwrap(), Signal::TERM),
        }
        let finished = moving.wait(WITHIN).unwrap();
        if kill != "towline" {
            assert_eq!(finished.status.code(), Some(1), "{kill}: {}", finished.stderr);
            assert!(finished.stderr.contains("safe at its source"), "{kill}: {}", finished.stderr);
            assert_eq!(last(&finished)["event"], "failed", "{kill}");
        }
        if kill == "agent, at once" {
            // The next agent ends the QEMU that this one has left.
            assert_eq!(hosts.there.guests().unwrap(), ["web"]);
        } else {
            hosts.assert_stays();
        }
    }
}
