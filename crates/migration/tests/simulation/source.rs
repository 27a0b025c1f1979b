//! The sending end: the protocol's states, the return path's rules and the convergence policy are the real
//! ones; the engine's threads are modelled here, one step at a time.

use std::collections::BTreeMap;
use std::time::Duration;

use towline_migration::convergence::{ConvergencePolicy, Observation, PassDecision};
use towline_protocol::Reader;
use towline_protocol::configuration::Configuration;
use towline_protocol::machine::{self, BarrierForm};
use towline_protocol::multifd::Packet;
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::source::{End, Iterating, Part, RamOptions, RamWriter, ReturnPathReader, Setup};

use super::guest::{Guest, PAGE, content, shown};
use super::lanes::{LaneOut, packet};
use super::net::{Gone, Net, Port, Time};
use super::out::Out;
use super::scenario::{Mutation, Scenario};

/// The protocol's states, as the engine keeps them.
#[derive(Debug)]
enum State {
    Iterating(Iterating),
    Part(Part),
    End(End),
    Written,
    Between,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Begin,
    AwaitPong,
    Pass,
    /// A pass's end is on its way.
    Closing,
    /// The guest is stopped.
    Last,
    /// Everything is sent or on its way.
    Await,
    Over,
}

#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) guest: Guest,
    pub(crate) phase: Phase,
    pub(crate) outcome: Option<Result<(), String>>,
    pub(crate) is_alive: bool,
    /// The guest's state when it was stopped, and the time since.
    pub(crate) stopped: Option<(Vec<Option<u64>>, u32, Time)>,
    scenario: Scenario,
    out: Out,
    lanes: Vec<LaneOut>,
    state: State,
    todo: Vec<usize>,
    policy: ConvergencePolicy,
    pass_begun: Time,
    content_bytes: u64,
    pub(crate) passes: u32,
    answers: ReturnPathReader,
    heard: Vec<u8>,
    /// The destination's content of each page, for XBZRLE.
    cache: BTreeMap<usize, u64>,
    dropped: bool,
}

impl Source {
    pub(crate) fn new(scenario: &Scenario, guest: Guest, main: Port, lanes: &[Port]) -> Self {
        Self {
            guest,
            phase: Phase::Begin,
            outcome: None,
            is_alive: true,
            stopped: None,
            scenario: scenario.clone(),
            out: Out::new(main),
            lanes: lanes.iter().map(|&port| LaneOut::new(Out::new(port))).collect(),
            state: State::Between,
            todo: Vec::new(),
            policy: ConvergencePolicy::new(scenario.limits),
            pass_begun: 0,
            content_bytes: 0,
            passes: 0,
            answers: ReturnPathReader::default(),
            heard: Vec::new(),
            cache: BTreeMap::new(),
            dropped: false,
        }
    }

    pub(crate) fn ports(&self) -> Vec<Port> {
        std::iter::once(self.out.port).chain(self.lanes.iter().map(|lane| lane.out.port)).collect()
    }

    /// Performs a step, if one is possible. Returns true if so.
    pub(crate) fn step(&mut self, net: &mut Net) -> bool {
        if !self.is_alive || self.outcome.is_some() {
            return false;
        }
        match self.try_step(net) {
            Ok(any) => any,
            Err(reason) => {
                self.fail(net, reason);
                true
            }
        }
    }

    /// Cancels the migration. Messages that the destination has already sent count.
    pub(crate) fn cancel(&mut self, net: &mut Net) {
        if !self.is_alive || self.outcome.is_some() {
            return;
        }
        while let Ok(true) = self.hear(net) {}
        if self.answers.has_shut() { self.succeed(net) } else { self.fail(net, "cancelled".into()) }
    }

    fn fail(&mut self, net: &mut Net, reason: String) {
        self.outcome = Some(Err(reason));
        self.phase = Phase::Over;
        self.ports().into_iter().for_each(|port| net.shut(port));
        // The guest that was stopped runs on.
        self.guest.running = !self.scenario.is_image;
    }

    fn succeed(&mut self, net: &mut Net) {
        self.outcome = Some(Ok(()));
        self.phase = Phase::Over;
        if self.scenario.return_path {
            self.ports().into_iter().for_each(|port| net.shut(port));
        }
    }

    fn try_step(&mut self, net: &mut Net) -> Result<bool, String> {
        let mut any = self.scenario.return_path && self.hear(net)?;
        if self.answers.has_shut() {
            self.succeed(net);
            return Ok(true);
        }
        let gone = |what: &str, gone: Gone| format!("{what}: {gone:?}");
        any |= self.out.pump(net, Some(&self.guest)).map_err(|error| gone("main channel", error))?;
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            any |= lane
                .out
                .pump(net, Some(&self.guest))
                .map_err(|error| gone(&format!("lane {index}"), error))?;
        }
        let worked = match self.phase {
            Phase::Begin => {
                self.begin();
                true
            }
            Phase::AwaitPong if self.is_idle() && (self.answers.has_pong() || !self.scenario.return_path) => {
                self.todo = (0..self.guest.layout.pages()).rev().collect();
                self.begin_pass(net);
                true
            }
            Phase::Pass | Phase::Last => self.produce(net),
            Phase::Closing if self.out.is_empty() => {
                self.decide(net)?;
                true
            }
            Phase::Await if !self.scenario.return_path && self.is_idle() => {
                self.succeed(net);
                true
            }
            _ => false,
        };
        Ok(any | worked)
    }

    fn is_idle(&self) -> bool {
        self.out.is_empty() && self.lanes.iter().all(|lane| lane.out.is_empty())
    }

    /// Processes received replies. Returns true if there were any.
    fn hear(&mut self, net: &mut Net) -> Result<bool, String> {
        let bytes = match net.recv(self.out.port, 512) {
            Ok(None) => return Ok(false),
            Ok(Some(bytes)) => bytes,
            Err(gone) => return Err(format!("the destination did not say that it has the guest: {gone:?}")),
        };
        self.heard.extend(bytes);
        let mut input = Reader::new(&self.heard);
        while let Some(message) = ReturnPathMessage::decode(&mut input).map_err(|error| error.to_string())? {
            self.answers.handle(&message).map_err(|error| error.to_string())?;
        }
        let taken = input.position();
        self.heard.drain(..taken);
        Ok(true)
    }

    fn begin(&mut self) {
        let mut bytes = Vec::new();
        let configuration =
            Configuration { machine_type: self.scenario.machine.into(), ..Configuration::default() };
        let setup = if self.scenario.return_path {
            Setup::begin_with_return_path(&configuration, &[], &mut bytes)
        } else {
            Setup::begin(&configuration, &mut bytes)
        };
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            lane.init(index);
            lane.sync(&self.guest.layout.blocks);
        }
        let barrier = (!self.lanes.is_empty()).then(|| BarrierForm::of(self.scenario.machine));
        let options = RamOptions { section_id: 2, barrier };
        self.state = State::Iterating(setup.write_ram_start(options, &self.guest.layout.blocks, &mut bytes));
        self.out.bytes(bytes);
        self.phase = Phase::AwaitPong;
    }

    fn begin_pass(&mut self, net: &Net) {
        self.step_state(|state, out| match state {
            State::Iterating(iterating) => State::Part(iterating.open_part(out)),
            state => state,
        });
        self.pass_begun = net.now;
        self.content_bytes = 0;
        self.passes += 1;
        self.enter(Phase::Pass);
    }

    fn enter(&mut self, phase: Phase) {
        self.lanes.iter_mut().for_each(|lane| lane.synced = false);
        self.phase = phase;
    }

    /// Names more pages, or ends the pass.
    fn produce(&mut self, net: &mut Net) -> bool {
        let lanes_empty = self.lanes.iter().all(|lane| lane.out.is_empty());
        if self.lanes.is_empty() {
            if !self.out.is_empty() {
                return false;
            }
            if !self.todo.is_empty() {
                self.break_section(net);
                self.main_unit(net);
                return true;
            }
        } else {
            let mut any = false;
            for index in 0..self.lanes.len() {
                if self.lanes[index].out.is_empty() && !self.lanes[index].synced {
                    self.lane_unit(net, index);
                    any = true;
                }
            }
            if any || !lanes_empty || !self.lanes.iter().all(|lane| lane.synced) {
                return any;
            }
        }
        self.end_pass();
        true
    }

    /// A QEMU's PART holds what fits into its bandwidth for a while, not a pass.
    fn break_section(&mut self, net: &mut Net) {
        if !self.scenario.breaks_sections || self.phase != Phase::Pass || net.rng.u8(0..4) > 0 {
            return;
        }
        self.step_state(|state, out| match state {
            State::Part(part) => State::Part(part.close(out).open_part(out)),
            state => state,
        });
    }

    /// Pages of one block, of those left.
    fn unit(&mut self, net: &mut Net) -> Vec<usize> {
        let most = net.rng.usize(1..=self.scenario.unit_pages);
        let layout = &self.guest.layout;
        let Some(&first) = self.todo.last() else { return Vec::new() };
        let block = layout.page_ref(first).block;
        let unit =
            self.todo.iter().rev().take(most).take_while(|&&page| layout.page_ref(page).block == block);
        let unit: Vec<_> = unit.copied().collect();
        self.todo.truncate(self.todo.len() - unit.len());
        unit
    }

    fn main_unit(&mut self, net: &mut Net) {
        for page in self.unit(net) {
            let (reference, version) = (self.guest.layout.page_ref(page), self.guest.version(page));
            if shown(version) == 0 {
                self.records(|records, out| records.zero(reference, out));
                self.cache.insert(page, version);
                continue;
            }
            self.content_bytes += PAGE as u64;
            if !self.scenario.xbzrle {
                self.records(|records, out| records.page(reference, out));
                self.out.page(page);
                continue;
            }
            let new = content(page, version);
            let changes = self.cache.insert(page, version).map(|old| changes(&content(page, old), &new));
            match changes.filter(|changes| changes.len() <= PAGE) {
                Some(changes) => self.records(|records, out| records.xbzrle(reference, &changes, out)),
                None => {
                    self.records(|records, out| records.page(reference, out));
                    self.out.bytes(new.to_vec());
                }
            }
        }
    }

    fn lane_unit(&mut self, net: &mut Net, index: usize) {
        let unit = self.unit(net);
        let Some(&first) = unit.first() else {
            if self.scenario.mutation == Some(Mutation::NoBarrier) && self.phase == Phase::Pass {
                self.lanes[index].synced = true;
                return;
            }
            return self.lanes[index].sync(&self.guest.layout.blocks);
        };
        let block = self.guest.layout.page_ref(first).block;
        let (zero, normal): (Vec<_>, Vec<_>) =
            unit.into_iter().partition(|&page| shown(self.guest.version(page)) == 0);
        self.content_bytes += (normal.len() * PAGE) as u64;
        let offsets = |pages: &[usize]| {
            pages.iter().map(|&page| self.guest.layout.page_ref(page).offset).collect::<Vec<_>>()
        };
        let (normal_offsets, mut zero_offsets) = (offsets(&normal), offsets(&zero));
        if !machine::lanes_carry_zero_pages(self.scenario.machine) {
            zero_offsets.clear();
            for &page in &zero {
                let reference = self.guest.layout.page_ref(page);
                self.records(|records, out| records.zero(reference, out));
            }
        }
        if normal_offsets.is_empty() && zero_offsets.is_empty() {
            return;
        }
        let mut packet = packet(block, normal_offsets, zero_offsets);
        // As QEMU before 9.0 does it, followed by an empty packet.
        packet.sync = self.scenario.syncs_on_pages && self.todo.is_empty();
        let (lane, blocks) = (&mut self.lanes[index], &self.guest.layout.blocks);
        lane.header(&packet, blocks);
        normal.iter().for_each(|&page| lane.out.page(page));
        lane.synced = packet.sync;
        lane.trails = packet.sync;
    }

    fn end_pass(&mut self) {
        if self.scenario.mutation != Some(Mutation::NoBarrier) || self.phase == Phase::Last {
            self.records(|records, out| records.barrier(out));
        }
        for lane in self.lanes.iter_mut().filter(|lane| lane.trails) {
            lane.header(&Packet::default(), &self.guest.layout.blocks);
            lane.trails = false;
        }
        if self.phase == Phase::Pass {
            self.step_state(|state, out| match state {
                State::Part(part) => State::Iterating(part.close(out)),
                state => state,
            });
            self.phase = Phase::Closing;
            return;
        }
        self.answers.expect_shut();
        self.step_state(|state, out| match state {
            State::End(end) => {
                end.close(out);
                State::Written
            }
            state => state,
        });
        self.out.bytes(super::device_state(self.guest.serial));
        self.phase = Phase::Await;
    }

    /// Between two passes.
    fn decide(&mut self, net: &mut Net) -> Result<(), String> {
        self.todo = self.harvest();
        let left = (self.todo.len() * PAGE) as u64;
        let time = Duration::from_nanos(net.now - self.pass_begun);
        let observation = Observation::of_pass(time, self.content_bytes, left);
        match self.policy.observe(&observation) {
            PassDecision::Continue => {
                self.todo.reverse();
                self.begin_pass(net);
                return Ok(());
            }
            PassDecision::CannotConverge(verdict) if self.scenario.gives_up => {
                return Err(verdict.to_string());
            }
            PassDecision::CannotConverge(_) | PassDecision::SwitchOver => {}
        }
        if !self.guest.running && !self.scenario.is_image {
            return Err("stopped twice".into());
        }
        self.guest.run_until(net.now, &mut net.rng);
        self.guest.running = false;
        let more = self.harvest();
        self.todo.extend(more);
        self.todo.sort_unstable();
        self.todo.dedup();
        self.todo.reverse();
        self.stopped = Some((self.guest.shown(), self.guest.serial, net.now));
        self.step_state(|state, out| match state {
            State::Iterating(iterating) => State::End(iterating.end(out)),
            state => state,
        });
        self.enter(Phase::Last);
        Ok(())
    }

    fn harvest(&mut self) -> Vec<usize> {
        let mut pages = self.guest.harvest();
        if self.scenario.mutation == Some(Mutation::DirtyPageLost) && !self.dropped && pages.len() > 1 {
            self.dropped = true;
            pages.pop();
        }
        pages
    }

    fn step_state(&mut self, next: impl FnOnce(State, &mut Vec<u8>) -> State) {
        let mut bytes = Vec::new();
        let state = std::mem::replace(&mut self.state, State::Between);
        self.state = next(state, &mut bytes);
        self.out.bytes(bytes);
    }

    fn records(&mut self, write: impl FnOnce(&mut RamWriter, &mut Vec<u8>)) {
        let mut bytes = Vec::new();
        match &mut self.state {
            State::Part(part) => write(part.records(), &mut bytes),
            State::End(end) => write(end.records(), &mut bytes),
            state => panic!("records in {state:?}"),
        }
        self.out.bytes(bytes);
    }
}

/// A page's changes in XBZRLE's form.
fn changes(old: &[u8; PAGE], new: &[u8; PAGE]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let number = |bytes: &mut Vec<u8>, run: usize| match run {
        0..0x80 => bytes.push(run as u8),
        _ => bytes.extend([(run & 0x7f) as u8 | 0x80, (run >> 7) as u8]),
    };
    let mut at = 0;
    while at < PAGE {
        let same = (at..PAGE).take_while(|&i| old[i] == new[i]).count();
        if at + same == PAGE {
            break;
        }
        number(&mut bytes, same);
        at += same;
        let other = (at..PAGE).take_while(|&i| old[i] != new[i]).count();
        number(&mut bytes, other);
        bytes.extend_from_slice(&new[at..at + other]);
        at += other;
    }
    bytes
}
