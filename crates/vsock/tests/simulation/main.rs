//! A guest, the device and the host's programs in virtual time: what each end sends must come to the other, whatever is
//! taken in part, late, or in another order.
//!
//! What is real: the rings, in shared memory, and all of the engine and the table. What is a model: the driver and its
//! connections (`guest.rs`), sockets and programs of the host (`host.rs`). A schedule follows from its seed;
//! `TOWLINE_SEEDS` says how many are run, `TOWLINE_SEED` runs one.
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
use towline_vsock::packet::Kind;
use towline_vsock::{Engine, Limits};

use guest::{CID, Guest, Machine, Name};
use host::{Shared, World, socket};
use plan::Plan;

const SEEDS: u64 = 3000;
/// Steps in any order, then steps until all is over; more would be a hang.
const STEPS: usize = 400;
const LAST_STEPS: usize = 20_000;

/// One run.
struct Run {
    guest: Guest,
    rx: Ring,
    tx: Ring,
    engine: Engine<World>,
    rng: fastrand::Rng,
    /// By what both ends call a connection: for those the host asks for, the guest's port.
    sockets: BTreeMap<u32, Shared>,
    plans: BTreeMap<u32, Plan>,
    names: BTreeMap<u32, Name>,
    next: u32,
    now_ms: u64,
}

impl Run {
    fn new(seed: u64, machine: Machine) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (guest, rx, tx) = Guest::new(machine, &mut rng);
        let world = World { rng: rng.fork(), listeners: BTreeMap::new(), later: Vec::new() };
        let buf_alloc = [4096, 20_000, 1 << 20][rng.usize(..3)].max(20_000);
        let limits = Limits { buf_alloc, ..Limits::default() };
        let engine = Engine::new(CID, limits, rng.u32(..), world);
        let (sockets, plans, names) = Default::default();
        Self { guest, rx, tx, engine, rng, sockets, plans, names, next: 100, now_ms: 0 }
    }

    fn begin(&mut self) {
        let plan = Plan::new(&mut self.rng, self.guest.alloc());
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
            self.names.insert(tag, (tag, tag));
        }
        self.sockets.insert(tag, socket);
    }

    /// Connections that the host asked for have their name when the guest has heard of them.
    fn learn_names(&mut self) {
        for name in self.guest.lines.keys() {
            self.names.entry(name.0).or_insert(*name);
        }
    }

    fn device(&mut self) {
        match self.rng.u32(..3) {
            0 => drop(self.engine.take(&mut self.tx)),
            1 => drop(self.engine.fill(&mut self.rx)),
            _ => {
                self.engine.take(&mut self.tx);
                self.engine.fill(&mut self.rx);
            }
        }
        self.rx.publish();
        self.tx.publish();
    }

    /// No packet comes back while the kernel reads it, whatever became of its connection.
    fn transmit(&mut self) {
        for (name, bytes) in self.guest.take_back() {
            let socket = self.sockets[&name.0].borrow();
            assert!(!socket.reads(&bytes), "{name:?}: {bytes:?} came back too early: {socket:?}");
        }
        self.guest.transmit(&mut self.rng.fork());
    }

    fn events(&mut self) {
        let later = std::mem::take(&mut self.engine.sockets_mut().later);
        for (id, socket) in later {
            self.engine.connected(id, Some(socket));
        }
        let sockets: Vec<Shared> = self.sockets.values().cloned().collect();
        for socket in sockets {
            let (id, (news, room), freed) = {
                let mut socket = socket.borrow_mut();
                let Some(id) = socket.id.filter(|_| !socket.device_closed) else { continue };
                (id, socket.news(), socket.free_some(&mut self.rng))
            };
            if freed {
                assert!(self.engine.freed(id), "it has lent nothing");
            }
            if let Some(news) = news {
                self.engine.readable(id, news);
            }
            if room {
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
        let name = self.any(|run| run.guest.lines.keys().copied().collect());
        let socket = self.any(|run| run.sockets.values().cloned().collect());
        match (self.rng.u32(..12), name, socket) {
            (0 | 1, Some(name), _) => self.guest.write(name, amount),
            (2 | 3, Some(name), _) => self.guest.read(name, amount),
            (4 | 5, _, Some(socket)) => socket.borrow_mut().write(amount),
            (6 | 7, _, Some(socket)) => socket.borrow_mut().read(amount),
            (8, ..) => self.transmit(),
            (9, ..) => {
                let most = self.rng.usize(..16);
                self.guest.post(most);
                self.guest.receive();
                self.learn_names();
            }
            (10, ..) => self.events(),
            _ => self.device(),
        }
    }

    fn deaths(&mut self) {
        let dying: Vec<u32> = self.plans.iter().filter(|(_, plan)| plan.dies).map(|(tag, _)| *tag).collect();
        for tag in dying {
            if self.rng.u32(..60) == 0 {
                match (self.rng.bool(), self.names.get(&tag)) {
                    (true, Some(name)) if self.guest.lines[name].open => self.guest.abort(*name),
                    (false, _) => self.sockets[&tag].borrow_mut().die(),
                    _ => {}
                }
            }
        }
    }

    /// Everybody does what there is to do. True if it is all over.
    fn last_step(&mut self) -> bool {
        let amount = self.amount();
        for name in self.guest.lines.keys().copied().collect::<Vec<_>>() {
            self.guest.write(name, amount);
            self.guest.read(name, amount);
        }
        for socket in self.sockets.values() {
            socket.borrow_mut().write(amount);
            socket.borrow_mut().read(amount);
        }
        self.transmit();
        self.guest.post(16);
        self.guest.receive();
        self.learn_names();
        self.events();
        self.device();
        self.now_ms += 1;
        self.engine.tick(self.now_ms);
        self.engine.table().is_empty()
            && !self.guest.has_queued()
            && self.guest.has_all_back()
            && self.is_over()
    }

    fn is_over(&self) -> bool {
        self.sockets.values().all(|socket| {
            let socket = socket.borrow();
            socket.closed || (socket.device_closed && (socket.is_complete() || socket.plan.dies))
        }) && self.guest.lines.values().all(|line| line.gone || line.plan.dies)
    }

    fn state(&self) -> String {
        let lines: Vec<_> = self.guest.lines.iter().filter(|(_, line)| !line.gone).collect();
        let sockets: Vec<_> =
            self.sockets.iter().filter(|(_, socket)| !socket.borrow().device_closed).collect();
        let connections: Vec<_> = self.engine.connections().collect();
        format!("{lines:#?}\n{sockets:#?}\n{connections:#?}\n{:#?}", self.engine.statistics())
    }

    fn judge(&self) {
        assert_eq!((self.engine.kept(), self.engine.lent()), (0, 0));
        for (tag, plan) in &self.plans {
            let socket = self.sockets[tag].borrow();
            let line = self.names.get(tag).map(|name| &self.guest.lines[name]);
            let prefix = |all: &[u32], some: &[u32]| plan.kind == Kind::Stream || all.starts_with(some);
            assert!(
                prefix(&plan.guest, &socket.messages),
                "{tag}: {:?} of {:?}",
                socket.messages,
                plan.guest
            );
            if let Some(line) = line {
                assert!(prefix(&plan.host, &line.messages), "{tag}: {:?} of {:?}", line.messages, plan.host);
            }
            if plan.dies {
                continue;
            }
            let line = line.unwrap_or_else(|| panic!("{tag}: the guest never heard of it"));
            assert!(!line.was_reset, "{tag}: it was reset, and nobody had died: {plan:?}");
            assert_eq!(line.read, plan.to_guest(), "{tag}: bytes to the guest, {plan:?}");
            assert!(line.has_read_all(), "{tag}: the guest knows of no end");
            assert!(
                socket.is_complete(),
                "{tag}: {} of {} bytes, {plan:?}",
                socket.given,
                plan.guest_bytes()
            );
            assert!(plan.kind == Kind::Stream || socket.messages == plan.guest, "{tag}: messages");
        }
    }
}

fn run(seed: u64, machine: Machine) -> Machine {
    let mut run = Run::new(seed, machine);
    let connections = run.rng.usize(1..6);
    for step in 0..STEPS {
        if step % 40 == 0 && run.plans.len() < connections {
            run.begin();
        }
        let amount = run.amount();
        run.step(amount);
        run.deaths();
    }
    let mut steps = 0;
    while !run.last_step() {
        steps += 1;
        assert!(steps < LAST_STEPS, "it hangs: {}", run.state());
    }
    run.judge();
    run.guest.into_machine()
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
                let mut machine = Machine::new();
                for seed in (first + thread..first + count).step_by(threads as usize) {
                    let failed =
                        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(seed, machine)));
                    match failed {
                        Ok(back) => machine = back,
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
