//! The relay between two QEMUs: it forwards its input, and the source receives only the destination's
//! messages. Decoders, writers and the return path's rules are the real ones; their order between them is
//! `Relay`'s and `Incoming`'s.

use std::collections::VecDeque;

use towline_protocol::Reader;
use towline_protocol::destination::SectionKind;
use towline_protocol::machine::BarrierForm;
use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::section::VmCommand;
use towline_protocol::source::{End, Iterating, Part, RamOptions, RamWriter, ReturnPathReader, Setup};

use super::guest::PAGE;
use super::lanes::{LaneOut, packet};
use super::net::{Net, Port};
use super::out::Out;
use super::receiver::{Deed, Receiver};
use super::scenario::{Mutation, Scenario};

#[derive(Debug)]
enum State {
    Start,
    Setup(Setup),
    Iterating(Iterating),
    Part(Part),
    End(End),
}

#[derive(Debug)]
pub(crate) struct Relay {
    pub(crate) is_alive: bool,
    /// The whole guest is in the hands of the connection.
    pub(crate) is_sent: bool,
    /// The destination has it: the migration can no longer be cancelled.
    pub(crate) is_finished: bool,
    pub(crate) outcome: Option<Result<(), String>>,
    scenario: Scenario,
    receiver: Receiver,
    to_source: Out,
    out: Out,
    lanes: Vec<LaneOut>,
    state: State,
    form: BarrierForm,
    answers: ReturnPathReader,
    heard: Vec<u8>,
    /// For the source, until it has opened its return path.
    kept: VecDeque<ReturnPathMessage>,
    has_return_path: bool,
    awaits_pong: bool,
    finishing: bool,
}

impl Relay {
    /// A relay with these ports to the source and to the destination: the main channel, then the lanes.
    pub(crate) fn new(scenario: &Scenario, near: &[Port], far: &[Port]) -> Self {
        let [near_main, near_lanes @ ..] = near else { panic!("no channel to the source") };
        let [far_main, far_lanes @ ..] = far else { panic!("no channel to the destination") };
        Self {
            is_alive: true,
            is_sent: false,
            is_finished: false,
            outcome: None,
            scenario: scenario.clone(),
            receiver: Receiver::new(*near_main, near_lanes),
            to_source: Out::new(*near_main),
            out: Out::new(*far_main),
            lanes: far_lanes.iter().map(|&port| LaneOut::new(Out::new(port))).collect(),
            state: State::Start,
            form: BarrierForm::of(scenario.machine),
            answers: ReturnPathReader::default(),
            heard: Vec::new(),
            kept: VecDeque::new(),
            has_return_path: false,
            awaits_pong: false,
            finishing: false,
        }
    }

    pub(crate) fn ports(&self) -> Vec<Port> {
        let lanes = self.lanes.iter().map(|lane| lane.out.port);
        self.receiver.ports().into_iter().chain([self.out.port]).chain(lanes).collect()
    }

    pub(crate) fn step(&mut self, net: &mut Net) -> bool {
        if !self.is_alive || self.outcome.is_some() {
            return false;
        }
        self.try_step(net).unwrap_or_else(|reason| {
            self.fail(net, reason);
            true
        })
    }

    /// Ends the migration, unless it went through.
    pub(crate) fn cancel(&mut self, net: &mut Net) {
        if self.is_alive && self.outcome.is_none() && !self.is_finished {
            self.fail(net, "cancelled".into());
        }
    }

    fn fail(&mut self, net: &mut Net, reason: String) {
        self.outcome = Some(Err(reason));
        self.ports().into_iter().for_each(|port| net.shut(port));
    }

    fn try_step(&mut self, net: &mut Net) -> Result<bool, String> {
        let mut any = self.hear(net)?;
        any |= self.to_source.pump(net, None).map_err(|gone| format!("to the source: {gone:?}"))?;
        if self.is_finished {
            if self.to_source.is_empty() {
                self.outcome = Some(Ok(()));
            }
            return Ok(true);
        }
        any |= self.out.pump(net, None).map_err(|gone| format!("to the destination: {gone:?}"))?;
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            any |= lane.out.pump(net, None).map_err(|gone| format!("lane {index} onwards: {gone:?}"))?;
        }
        // A sending thread does nothing else: a blocked send blocks receiving from the source.
        for index in 0..self.lanes.len() {
            if self.lanes[index].out.is_empty() {
                any |= self.step_lane(net, index)?;
            }
        }
        let lanes_empty = self.lanes.iter().all(|lane| lane.out.is_empty());
        if self.finishing && self.out.is_empty() {
            self.is_sent = true;
            self.commit();
            return Ok(any | self.is_finished);
        }
        self.awaits_pong &= !self.answers.has_pong();
        // A lane has arrived at a barrier when its data has been forwarded.
        let waits = self.awaits_pong || self.finishing || (self.receiver.is_leading() && !lanes_empty);
        if self.out.is_empty()
            && !waits
            && let Some(deed) = self.receiver.step_main(net)?
        {
            any = true;
            self.apply(deed)?;
        }
        Ok(any)
    }

    fn hear(&mut self, net: &mut Net) -> Result<bool, String> {
        if self.answers.has_shut() {
            return Ok(false);
        }
        let bytes = match net.recv(self.out.port, 512) {
            Ok(None) => return Ok(false),
            Ok(Some(bytes)) => bytes,
            Err(gone) => return Err(format!("the destination did not say that it has the guest: {gone:?}")),
        };
        self.heard.extend(bytes);
        let mut input = Reader::new(&self.heard);
        while let Some(message) = ReturnPathMessage::decode(&mut input).map_err(|error| error.to_string())? {
            self.answers.handle(&message).map_err(|error| error.to_string())?;
            if message == ReturnPathMessage::SwitchoverAck {
                self.kept.push_back(message);
            }
        }
        let taken = input.position();
        self.heard.drain(..taken);
        self.forward();
        Ok(true)
    }

    fn forward(&mut self) {
        while self.has_return_path
            && let Some(message) = self.kept.pop_front()
        {
            self.say(&message);
        }
    }

    fn commit(&mut self) {
        let early = self.scenario.mutation == Some(Mutation::ForwardedEarly);
        if self.answers.has_shut() || early {
            self.is_finished = true;
            self.say(&ReturnPathMessage::Shut(0));
        }
    }

    fn step_lane(&mut self, net: &mut Net, index: usize) -> Result<bool, String> {
        let (came, packet_in) = self.receiver.step_lane(net, index)?;
        let Some((packet_in, contents)) = packet_in else { return Ok(came) };
        let Some(block) = packet_in.block else { return Ok(true) };
        let (lane, blocks) = (&mut self.lanes[index], &self.receiver.blocks);
        if !packet_in.normal.is_empty() {
            lane.header(&packet(block, packet_in.normal, Vec::new()), blocks);
            lane.out.bytes(contents);
        }
        if !packet_in.zero.is_empty() {
            lane.header(&packet(block, Vec::new(), packet_in.zero), blocks);
        }
        Ok(true)
    }

    fn apply(&mut self, deed: Deed) -> Result<(), String> {
        match deed {
            Deed::Configuration(configuration) => {
                let mut bytes = Vec::new();
                self.state = State::Setup(Setup::begin_with_return_path(&configuration, &[], &mut bytes));
                self.out.bytes(bytes);
                self.lanes.iter_mut().enumerate().for_each(|(index, lane)| lane.init(index));
            }
            Deed::Command(VmCommand::OpenReturnPath) => {
                self.has_return_path = true;
                self.forward();
            }
            Deed::Command(VmCommand::Ping(value)) => self.say(&ReturnPathMessage::Pong(value)),
            Deed::SectionStart(_) if !self.has_return_path => return Err("no return path".into()),
            Deed::Blocks(blocks) => {
                self.lanes.iter_mut().for_each(|lane| lane.sync(&blocks));
                let barrier = (!self.lanes.is_empty()).then_some(self.form);
                let options = RamOptions { section_id: 2, barrier };
                self.step_state(|state, out| match state {
                    State::Setup(setup) => State::Iterating(setup.write_ram_start(options, &blocks, out)),
                    state => state,
                });
                self.awaits_pong = true;
            }
            Deed::SectionStart(section) => self.step_state(|state, out| match (state, section.kind) {
                (State::Iterating(iterating), SectionKind::Part) => State::Part(iterating.open_part(out)),
                (State::Iterating(iterating), SectionKind::End) => State::End(iterating.end(out)),
                (state, _) => state,
            }),
            Deed::SectionEnd(SectionKind::Part) => self.step_state(|state, out| match state {
                State::Part(part) => State::Iterating(part.close(out)),
                state => state,
            }),
            Deed::Page(page, bytes) => {
                self.records(|records, out| records.page(page, out))?;
                assert_eq!(bytes.len(), PAGE);
                self.out.bytes(bytes);
            }
            Deed::Zero(page) => self.records(|records, out| records.zero(page, out))?,
            Deed::Xbzrle(..) => return Err("XBZRLE cannot be relayed".into()),
            Deed::Barrier => {
                // START's own was sent with the blocks.
                if matches!(self.state, State::Part(_) | State::End(_)) {
                    let blocks = &self.receiver.blocks;
                    self.lanes.iter_mut().for_each(|lane| lane.sync(blocks));
                    self.records(|records, out| records.barrier(out))?;
                }
                let deed = self.receiver.after_barrier();
                self.apply(deed)?;
            }
            Deed::DeviceState(state) => {
                self.answers.expect_shut();
                if let State::End(end) = std::mem::replace(&mut self.state, State::Start) {
                    let mut bytes = Vec::new();
                    end.close(&mut bytes);
                    self.out.bytes(bytes);
                }
                self.out.bytes(state.bytes().to_vec());
                self.finishing = true;
            }
            Deed::Command(_) | Deed::SectionEnd(_) | Deed::Step => {}
        }
        Ok(())
    }

    fn step_state(&mut self, next: impl FnOnce(State, &mut Vec<u8>) -> State) {
        let mut bytes = Vec::new();
        let state = std::mem::replace(&mut self.state, State::Start);
        self.state = next(state, &mut bytes);
        self.out.bytes(bytes);
    }

    fn records(&mut self, write: impl FnOnce(&mut RamWriter, &mut Vec<u8>)) -> Result<(), String> {
        let mut bytes = Vec::new();
        match &mut self.state {
            State::Part(part) => write(part.records(), &mut bytes),
            State::End(end) => write(end.records(), &mut bytes),
            _ => return Err("records outside a section".into()),
        }
        self.out.bytes(bytes);
        Ok(())
    }

    fn say(&mut self, message: &ReturnPathMessage) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        self.to_source.bytes(bytes);
    }
}
