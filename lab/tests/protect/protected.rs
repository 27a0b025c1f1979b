//! A protected guest, and what becomes of it.

use std::time::Duration;

use fastrand::Rng;
use serde_json::Value;
use towline_lab::expect::{assert_ended, events, qmp, wait_event};
use towline_lab::{Finished, Towline, wait_until};

use crate::clients::Clients;
use crate::support::{Hosts, Links, Side, WITHIN};
use crate::{PROOF, ends_well};

/// Exit status of a protection whose guest is gone here.
pub(crate) const GONE: i32 = 7;

/// A protected guest, and the connections to it.
pub(crate) struct Protected {
    pub(crate) hosts: Hosts,
    pub(crate) protecting: Towline,
    pub(crate) clients: Clients,
    /// Its tick at the beginning.
    pub(crate) tick: u64,
}

impl Protected {
    /// `None`: the test is skipped.
    pub(crate) fn new(test: &str) -> Option<Self> {
        let mut hosts = Hosts::new(test)?;
        let tick = hosts.guest.as_mut().unwrap().tick().unwrap();
        let protecting = hosts.protected();
        let clients = hosts.clients();
        clients.wait_more(2);
        clients.forget_gaps();
        Some(Self { hosts, protecting, clients, tick })
    }

    /// Last generation that was claimed.
    pub(crate) fn generation(&self) -> u64 {
        self.hosts.generations().last().copied().unwrap_or_default()
    }

    /// The connections go on. Returns the longest time without a reply until then.
    pub(crate) fn goes_on(&self) -> Duration {
        self.clients.wait_more(PROOF);
        let gap = self.clients.snapshot().longest_gap();
        self.clients.forget_gaps();
        gap
    }

    /// Waits until the same towline protects the guest in a later generation than this one.
    pub(crate) fn is_protected_again(&mut self, generation: u64) {
        wait_event(&mut self.protecting, "another protection", WITHIN, |event| {
            event["event"] == "protected" && event["generation"].as_u64() > Some(generation)
        });
    }

    /// Waits until one of both hosts has the guest after this generation. The one that protects it again has it, too.
    pub(crate) fn wait_decided(&self, generation: u64) -> Side {
        let decided = || {
            let protected = events(&self.protecting.stdout());
            let is_later = |event: &Value| event["generation"].as_u64() > Some(generation);
            let again = protected.iter().any(|event| event["event"] == "protected" && is_later(event));
            Ok(if again { Some(Side::Here) } else { self.hosts.passing().first().copied() })
        };
        wait_until("a decision between the hosts", WITHIN, decided).unwrap()
    }

    /// Reports of checkpoints so far.
    fn reports(&self) -> usize {
        let events = events(&self.protecting.stdout());
        events.iter().filter(|event| event["event"] == "checkpoints").count()
    }

    /// Waits until further checkpoints are reported.
    pub(crate) fn takes_checkpoints(&mut self) {
        let before = self.reports();
        wait_until("further checkpoints", WITHIN, || {
            self.protecting.check()?;
            Ok((self.reports() > before).then_some(()))
        })
        .unwrap();
    }

    /// Waits until the protection goes on, or a later generation has decided which host has the guest. Returns that host.
    pub(crate) fn settled(&self, generation: u64) -> Option<Side> {
        let before = self.reports();
        wait_until("an end of the disturbance", WITHIN, || {
            Ok((self.generation() > generation || self.reports() > before + 1).then_some(()))
        })
        .unwrap();
        (self.generation() > generation).then(|| self.wait_decided(generation))
    }

    /// The guest's host dies, and the guest goes on at the other one.
    pub(crate) fn survives_its_host(mut self, random: &mut Rng) {
        let (tick, generation) = (self.hosts.guest.take().unwrap().tick().unwrap(), self.generation());
        self.clients.forget_gaps();
        self.hosts.kill_here(Links::Stay, random);
        println!("  its host died: {:.0?} without a reply", self.goes_on());
        self.hosts.assert_goes_on_there(tick);
        assert_eq!(self.generation(), generation + 1);
        ends_well(self.clients);
    }

    /// The guest is at the other host, and was ended here.
    pub(crate) fn has_gone_there(self) {
        let Self { hosts, protecting, clients, tick } = self;
        hosts.source.wait_exit(WITHIN).unwrap();
        assert_ended(&protecting.wait(WITHIN).unwrap(), GONE, &[]);
        hosts.assert_goes_on_there(tick);
        assert_eq!(hosts.passing(), [Side::There]);
        ends_well(clients);
    }

    /// The guest runs on here, unprotected, and the other host has none.
    pub(crate) fn has_stayed(mut self) {
        self.hosts.assert_stays(self.tick);
        assert_eq!(self.hosts.passing(), [Side::Here]);
        ends_well(self.clients);
    }

    /// Repairs the guest's QEMU after the death of its keeper.
    pub(crate) fn repair(&self) -> Finished {
        let repairing = self.hosts.run_here(&["repair", "--json", &qmp(&self.hosts.source)]);
        repairing.wait(WITHIN).unwrap()
    }
}
