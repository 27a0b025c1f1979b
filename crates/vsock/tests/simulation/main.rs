//! A guest, the device and the host's programs in virtual time: data of each end must reach the other, even
//! if parts of it are transferred late or in another order.
//!
//! Rings, in shared memory, and all of the engine and the table are real. The driver and its connections
//! (`guest.rs`) and the sockets and programs of the host (`host.rs`) are models. A schedule is derived from
//! its seed; `TOWLINE_SEEDS` is the number of schedules, `TOWLINE_SEED` selects one.
#![allow(clippy::unwrap_used, reason = "tests, with their helpers")]

mod device_fuzz;
mod guest;
mod host;
mod hostile;
mod packets;
mod pipes;
mod plan;

use std::collections::BTreeMap;

use towline_vhost_user::Ring;
use towline_vsock::packet::SocketType;
use towline_vsock::{ConnectionLimits, Engine};

use guest::{CID, Guest, Ports, TestMemory};
use host::{Shared, World, socket};
use plan::Plan;

const SEEDS: u64 = 1200;
/// Number of steps in any order, and maximum of those until all connections have ended; more would be a hang.
const STEPS: usize = 400;
const LAST_STEPS: usize = 60_000;

/// One run.
struct Run {
    guest: Guest,
    rx: Ring,
    tx: Ring,
    engine: Engine<World>,
    rng: fastrand::Rng,
    /// By a tag of the connection: the port that one end connects to.
    sockets: BTreeMap<u32, Shared>,
    plans: BTreeMap<u32, Plan>,
    ports: BTreeMap<u32, Ports>,
    next: u32,
    now_ms: u64,
}

impl Run {
    fn new(seed: u64, memory: TestMemory) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (guest, rx, tx) = Guest::new(memory, &mut rng);
        let world = World { rng: rng.fork(), listeners: BTreeMap::new(), connecting: Vec::new() };
        let buf_alloc = [4096, 20_000, 1 << 20][rng.usize(..3)].max(20_000);
        let limits = ConnectionLimits { buf_alloc, ..ConnectionLimits::default() };
        let engine = Engine::new(CID, limits, rng.u32(..), world);
        let (sockets, plans, ports) = Default::default();
        Self { guest, rx, tx, engine, rng, sockets, plans, ports, next: 100, now_ms: 0 }
    }

    fn begin(&mut self) {
        let plan = Plan::new(&mut self.rng, self.guest.buf_alloc());
        let tag = self.next;
        self.next += 1;
        let socket = socket(&plan, &mut self.rng);
        self.plans.insert(tag, plan.clone());
        if self.rng.bool() {
            self.guest.expected.insert(tag, plan.clone());
            assert!(self.engine.open(tag, plan.kind, 2, socket.clone()).is_ok());
        } else {
            self.engine.sockets_mut().listeners.insert(tag, socket.clone());
            self.guest.connect((tag, tag), plan);
            self.ports.insert(tag, (tag, tag));
        }
        self.sockets.insert(tag, socket);
    }

    /// The ports of connections that the host opens are known when the guest has received the request.
    fn learn_ports(&mut self) {
        for ports in self.guest.connections.keys() {
            self.ports.entry(ports.0).or_insert(*ports);
        }
    }

    fn device(&mut self) {
        match self.rng.u32(..3) {
            0 => drop(self.engine.process_tx(&mut self.tx)),
            1 => drop(self.engine.process_rx(&mut self.rx)),
            _ => {
                self.engine.process_tx(&mut self.tx);
                self.engine.process_rx(&mut self.rx);
            }
        }
        self.rx.publish();
        self.tx.publish();
    }

    fn transmit(&mut self) {
        self.guest.reclaim();
        self.guest.transmit(&mut self.rng.fork());
    }

    fn events(&mut self) {
        let connecting = std::mem::take(&mut self.engine.sockets_mut().connecting);
        for (id, socket) in connecting {
            self.engine.connected(id, Some(socket));
        }
        let sockets: Vec<Shared> = self.sockets.values().cloned().collect();
        for socket in sockets {
            let (id, (readiness, has_space)) = {
                let mut socket = socket.borrow_mut();
                let Some(id) = socket.id.filter(|_| !socket.device_closed) else { continue };
                (id, socket.events())
            };
            if let Some(readiness) = readiness {
                self.engine.readable(id, readiness);
            }
            if has_space {
                self.engine.writable(id);
            }
        }
    }

    fn any<T: Clone>(&mut self, of: impl Fn(&Self) -> Vec<T>) -> Option<T> {
        let all = of(self);
        (!all.is_empty()).then(|| all[self.rng.usize(..all.len())].clone())
    }

    fn amount(&mut self) -> u32 {
        [1, 50, 3000, 100_000][self.rng.usize(..4)]
    }

    fn step(&mut self, amount: u32) {
        let ports = self.any(|run| run.guest.connections.keys().copied().collect());
        let socket = self.any(|run| run.sockets.values().cloned().collect());
        match (self.rng.u32(..12), ports, socket) {
            (0 | 1, Some(ports), _) => self.guest.write(ports, amount),
            (2 | 3, Some(ports), _) => self.guest.read(ports, amount),
            (4 | 5, _, Some(socket)) => socket.borrow_mut().write(amount),
            (6 | 7, _, Some(socket)) => socket.borrow_mut().read(amount),
            (8, ..) => self.transmit(),
            (9, ..) => {
                let most = self.rng.usize(..16);
                self.guest.post(most);
                self.guest.receive();
                self.learn_ports();
            }
            (10, ..) => self.events(),
            _ => self.device(),
        }
    }

    fn aborts(&mut self) {
        let aborting: Vec<u32> =
            self.plans.iter().filter(|(_, plan)| plan.aborts).map(|(tag, _)| *tag).collect();
        for tag in aborting {
            if self.rng.u32(..60) == 0 {
                match (self.rng.bool(), self.ports.get(&tag)) {
                    (true, Some(ports)) if self.guest.connections[ports].open => self.guest.abort(*ports),
                    (false, _) => self.sockets[&tag].borrow_mut().abort(),
                    _ => {}
                }
            }
        }
    }

    /// Both ends and the device do all that they can. Returns true if all connections have ended.
    fn last_step(&mut self) -> bool {
        let amount = self.amount();
        for ports in self.guest.connections.keys().copied().collect::<Vec<_>>() {
            self.guest.write(ports, amount);
            self.guest.read(ports, amount);
        }
        for socket in self.sockets.values() {
            socket.borrow_mut().write(amount);
            socket.borrow_mut().read(amount);
        }
        self.transmit();
        self.guest.post(16);
        self.guest.receive();
        self.learn_ports();
        self.events();
        self.device();
        self.now_ms += 5;
        self.engine.tick(self.now_ms);
        self.engine.table().is_empty()
            && !self.guest.has_queued()
            && self.guest.has_reclaimed_all()
            && self.is_over()
    }

    fn is_over(&self) -> bool {
        self.sockets.values().all(|socket| {
            let socket = socket.borrow();
            socket.closed || (socket.device_closed && (socket.is_complete() || socket.plan.aborts))
        }) && self.guest.connections.values().all(|connection| connection.closed || connection.plan.aborts)
    }

    fn state(&self) -> String {
        let open = self.guest.connections.iter().filter(|(_, connection)| !connection.closed);
        let guest_connections: Vec<_> = open.collect();
        let sockets: Vec<_> =
            self.sockets.iter().filter(|(_, socket)| !socket.borrow().device_closed).collect();
        let connections: Vec<_> = self.engine.connections().collect();
        format!("{guest_connections:#?}\n{sockets:#?}\n{connections:#?}\n{:#?}", self.engine.statistics())
    }

    fn check(&self) {
        assert_eq!(self.engine.buffered_bytes(), 0);
        for (tag, plan) in &self.plans {
            let socket = self.sockets[tag].borrow();
            let connection = self.ports.get(tag).map(|ports| &self.guest.connections[ports]);
            let prefix = |all: &[u32], some: &[u32]| plan.kind == SocketType::Stream || all.starts_with(some);
            assert!(
                prefix(&plan.guest, &socket.messages),
                "{tag}: {:?} of {:?}",
                socket.messages,
                plan.guest
            );
            if let Some(connection) = connection {
                assert!(
                    prefix(&plan.host, &connection.messages),
                    "{tag}: {:?} of {:?}",
                    connection.messages,
                    plan.host
                );
            }
            if plan.aborts {
                continue;
            }
            let connection =
                connection.unwrap_or_else(|| panic!("{tag}: the guest never received a request"));
            assert!(!connection.was_reset, "{tag}: reset without an abort: {plan:?}");
            assert_eq!(connection.read, plan.to_guest(), "{tag}: bytes to the guest, {plan:?}");
            assert!(connection.has_read_all(), "{tag}: the guest has not received the end of the stream");
            assert!(socket.is_complete(), "{tag}: {} of {} bytes, {plan:?}", socket.sent, plan.guest_bytes());
            assert!(plan.kind == SocketType::Stream || socket.messages == plan.guest, "{tag}: messages");
        }
    }
}

fn run(seed: u64, memory: TestMemory) -> TestMemory {
    let mut run = Run::new(seed, memory);
    let connections = run.rng.usize(1..6);
    for step in 0..STEPS {
        if step % 40 == 0 && run.plans.len() < connections {
            run.begin();
        }
        let amount = run.amount();
        run.step(amount);
        run.aborts();
    }
    let mut steps = 0;
    while !run.last_step() {
        steps += 1;
        assert!(steps < LAST_STEPS, "it hangs: {}", run.state());
    }
    run.check();
    run.guest.into_memory()
}

fn seeds() -> (u64, u64) {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    match number("TOWLINE_SEED") {
        Some(seed) => (seed, 1),
        None => (0, number("TOWLINE_SEEDS").unwrap_or(SEEDS)),
    }
}

#[test]
fn no_byte_is_lost_in_any_order() {
    let (first, count) = seeds();
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut memory = TestMemory::new();
                for seed in (first + thread..first + count).step_by(threads as usize) {
                    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(seed, memory)));
                    match failed {
                        Ok(back) => memory = back,
                        Err(panic) => {
                            eprintln!("TOWLINE_SEED={seed} fails");
                            std::panic::resume_unwind(panic);
                        }
                    }
                }
            });
        }
    });
}
