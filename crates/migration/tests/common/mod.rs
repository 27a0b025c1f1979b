//! Helpers shared by the tests of this crate: guests, connections with faults, and migrations with a
//! watchdog.
#![allow(dead_code)] // Not every test file needs all of it.

mod guests;
mod links;

pub(crate) use guests::*;
pub(crate) use links::*;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use towline_channel::{Channel, ChannelExt, IoBuf, SendFlags};
use towline_migration::convergence::MinWindow;
use towline_migration::outgoing::Unconverged;
use towline_migration::{
    Compression, Error, Guest, Incoming, Memory, Outgoing, Relay, Session, Sink, Snapshot, Statistics,
    incoming, outgoing,
};
use towline_protocol::return_path::ReturnPathMessage;

/// Far enough for a loaded machine: only a hanging test reaches it.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);
pub(crate) const UUID: [u8; 16] = [7; 16];

/// Result of one end of a migration.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) result: Result<(), Error>,
    pub(crate) statistics: Snapshot,
    /// Since both ends had begun.
    pub(crate) elapsed: Duration,
}

/// Results of both ends, and of the relays between.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) source: End,
    pub(crate) destination: End,
    pub(crate) relays: Vec<End>,
}

impl Outcome {
    pub(crate) fn slowest(&self) -> Duration {
        self.source.elapsed.max(self.destination.elapsed)
    }

    pub(crate) fn expect_success(&self) {
        assert!(self.source.result.is_ok() && self.destination.result.is_ok(), "{self:?}");
        assert!(self.relays.iter().all(|relay| relay.result.is_ok()), "{self:?}");
    }
}

/// Fast decisions, many passes.
pub(crate) fn options() -> outgoing::Options {
    outgoing::Options {
        downtime_limit: Duration::from_micros(1),
        min_window: MinWindow { passes: 1, time: Duration::ZERO },
        unconverged: Unconverged::SwitchOver,
        ..Default::default()
    }
}

pub(crate) fn migrate(link: Link, guest: &Arc<Memory>, sink: &Arc<Memory>) -> Outcome {
    migrate_over(vec![link], guest, sink, options(), &Arc::default())
}

/// Migrates over one link, or over several with a relay between each two.
pub(crate) fn migrate_over(
    links: Vec<Link>,
    guest: &Arc<impl Guest + Send + 'static>,
    sink: &Arc<impl Sink + Send + 'static>,
    options: outgoing::Options,
    session: &Arc<Session>,
) -> Outcome {
    migrate_into(links, guest, sink, options, options.compression, session)
}

/// As [`migrate_over`], with ends that may disagree about compression.
pub(crate) fn migrate_into(
    links: Vec<Link>,
    guest: &Arc<impl Guest + Send + 'static>,
    sink: &Arc<impl Sink + Send + 'static>,
    options: outgoing::Options,
    compression: Compression,
    session: &Arc<Session>,
) -> Outcome {
    let (tell, told) = mpsc::channel();
    let begun = Instant::now();
    let mut links = links.into_iter();
    let first = links.next().expect("at least one link");
    let (guest, session, teller) = (Arc::clone(guest), Arc::clone(session), tell.clone());
    let source = first.source;
    thread::spawn(move || {
        let statistics = Arc::<Statistics>::default();
        let result = Outgoing::new(session, Arc::clone(&statistics), options).run(&source, &*guest);
        drop(source);
        let _ = teller.send((0, result, statistics.snapshot(), begun.elapsed()));
    });
    let mut arriving = first.destination;
    let mut hops = 1;
    for link in links {
        let (from, to, teller) =
            (std::mem::replace(&mut arriving, link.destination), link.source, tell.clone());
        let number = hops;
        thread::spawn(move || {
            let session = Arc::<Session>::default();
            let options = outgoing::LaneOptions { compression, zero_copy_send: options.zero_copy_send };
            let relay = Relay::new(Arc::clone(&session), to, options).unwrap();
            let (result, statistics) = receive(from, &relay, &session, compression);
            drop(relay);
            let _ = teller.send((number, result, statistics, begun.elapsed()));
        });
        hops += 1;
    }
    let sink = Arc::clone(sink);
    let number = hops;
    thread::spawn(move || {
        let (result, statistics) = receive(arriving, &*sink, &Arc::default(), compression);
        let _ = tell.send((number, result, statistics, begun.elapsed()));
    });
    let mut ends: Vec<Option<End>> = (0..=hops).map(|_| None).collect();
    for _ in 0..=hops {
        let Ok((number, result, statistics, elapsed)) = told.recv_timeout(WATCHDOG) else {
            panic!("the migration hangs; so far: {ends:#?}");
        };
        ends[number] = Some(End { result, statistics, elapsed });
    }
    let mut ends = ends.into_iter().flatten();
    let source = ends.next().unwrap();
    let destination = ends.next_back().unwrap();
    Outcome { source, destination, relays: ends.collect() }
}

/// Replies to a source's first PING, so it begins.
pub(crate) fn answer_ping(main: &dyn Channel) {
    let mut bytes = Vec::new();
    ReturnPathMessage::Pong(1).encode(&mut bytes);
    main.send_all(&[IoBuf::from(&bytes[..])], SendFlags::empty()).unwrap();
}

pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < WATCHDOG, "{what}: not within {WATCHDOG:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn receive(
    end: DestinationEnd,
    sink: &dyn Sink,
    session: &Arc<Session>,
    compression: Compression,
) -> (Result<(), Error>, Snapshot) {
    let statistics = Arc::<Statistics>::default();
    let options = incoming::Options { compression, ..Default::default() };
    let incoming = Incoming::new(Arc::clone(session), Arc::clone(&statistics), options);
    let connections = incoming::Connections::connected(end.main, &end.lanes, Duration::from_secs(5));
    let result = connections.and_then(|connections| incoming.run(&connections, sink));
    if let Err(error) = &result {
        // A relay's other side: the incoming connections may never have come to run.
        session.fail(Error::guest(std::io::Error::other(error.to_string())));
    }
    (result, statistics.snapshot())
}
