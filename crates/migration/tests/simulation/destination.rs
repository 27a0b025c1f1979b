//! The receiving end with its own memory: a QEMU that loads and stays paused, or a towline that runs the
//! guest on its own.

use towline_protocol::return_path::ReturnPathMessage;
use towline_protocol::section::VmCommand;
use towline_protocol::xbzrle;

use super::guest::{Guest, Layout, PAGE, content, recognized};
use super::net::{Net, Port};
use super::out::Out;
use super::receiver::{Deed, Receiver};
use super::scenario::{Mutation, Scenario};

#[derive(Debug)]
pub(crate) struct Endpoint {
    /// The counter of each page; `None`: a mixture.
    pub(crate) memory: Vec<Option<u64>>,
    pub(crate) serial: Option<u32>,
    pub(crate) is_alive: bool,
    /// Everything is loaded.
    pub(crate) is_loaded: bool,
    /// The message about it was given to the connection.
    pub(crate) has_said_so: bool,
    pub(crate) running: bool,
    pub(crate) outcome: Option<Result<(), String>>,
    pub(crate) steps: u64,
    scenario: Scenario,
    layout: Option<Layout>,
    receiver: Receiver,
    answers: Out,
    has_return_path: bool,
    saying: bool,
}

impl Endpoint {
    pub(crate) fn new(scenario: &Scenario, main: Port, lanes: &[Port]) -> Self {
        Self {
            memory: Vec::new(),
            serial: None,
            is_alive: true,
            is_loaded: false,
            has_said_so: false,
            running: false,
            outcome: None,
            steps: 0,
            scenario: scenario.clone(),
            layout: None,
            receiver: Receiver::new(main, lanes),
            answers: Out::new(main),
            has_return_path: false,
            saying: false,
        }
    }

    pub(crate) fn ports(&self) -> Vec<Port> {
        self.receiver.ports()
    }

    pub(crate) fn step(&mut self, net: &mut Net) -> bool {
        if !self.is_alive || self.outcome.is_some() {
            return false;
        }
        let result = self.try_step(net);
        self.steps += u64::from(matches!(result, Ok(true)));
        result.unwrap_or_else(|reason| {
            self.fail(net, reason);
            true
        })
    }

    /// Ends an endpoint that cannot load the guest.
    pub(crate) fn fail(&mut self, net: &mut Net, reason: String) {
        if self.outcome.is_none() {
            self.outcome = Some(Err(reason));
            self.ports().into_iter().for_each(|port| net.shut(port));
        }
    }

    fn try_step(&mut self, net: &mut Net) -> Result<bool, String> {
        let mut any =
            self.answers.pump(net, None::<&Guest>).map_err(|gone| format!("return path: {gone:?}"))?;
        if self.saying && self.answers.is_empty() {
            self.has_said_so = true;
            self.outcome = Some(Ok(()));
            self.running = !self.scenario.is_controlled && self.is_loaded;
            return Ok(true);
        }
        for index in 0..self.receiver.lanes() {
            let (came, packet) = self.receiver.step_lane(net, index)?;
            any |= came;
            if let Some((packet, contents)) = packet {
                let layout = self.layout.as_ref();
                let page = |offset: u64| {
                    let block = packet.block.expect("it has pages");
                    let page = towline_protocol::PageRef { block, offset };
                    layout.expect("the blocks are known before pages come").number(page)
                };
                for (&offset, bytes) in packet.normal.iter().zip(contents.chunks_exact(PAGE)) {
                    self.memory[page(offset)] = recognized(page(offset), bytes);
                }
                packet.zero.iter().for_each(|&offset| self.memory[page(offset)] = Some(0));
            }
        }
        if let Some(deed) = self.receiver.step_main(net)? {
            any = true;
            self.apply(deed)?;
        }
        Ok(any)
    }

    fn apply(&mut self, deed: Deed) -> Result<(), String> {
        let number = |page| self.layout.as_ref().expect("blocks come first").number(page);
        match deed {
            Deed::Blocks(blocks) => {
                let layout = Layout { blocks };
                self.memory = vec![Some(0); layout.pages()];
                self.layout = Some(layout);
            }
            Deed::Command(VmCommand::OpenReturnPath) => self.has_return_path = true,
            Deed::Command(VmCommand::Ping(value)) => self.say(&ReturnPathMessage::Pong(value)),
            Deed::SectionStart(_) if !self.has_return_path && self.scenario.return_path => {
                return Err("the stream opens no return path".into());
            }
            Deed::Page(page, bytes) => {
                let page = number(page);
                self.memory[page] = recognized(page, &bytes);
            }
            Deed::Zero(page) => {
                let page = number(page);
                self.memory[page] = Some(0);
            }
            Deed::Xbzrle(page, data) => {
                let page = number(page);
                let mut bytes = content(page, self.memory[page].ok_or("XBZRLE over a mixture")?);
                xbzrle::decode(&data, &mut bytes).map_err(|error| error.to_string())?;
                self.memory[page] = recognized(page, &bytes);
            }
            Deed::Barrier => {
                let deed = self.receiver.after_barrier();
                return self.apply(deed);
            }
            Deed::DeviceState(state) => {
                self.serial = Some(super::serial_of(state.bytes()));
                self.is_loaded = true;
                self.acknowledge();
            }
            Deed::SectionEnd(towline_protocol::destination::SectionKind::End)
                if self.scenario.mutation == Some(Mutation::AcknowledgedEarly) =>
            {
                self.acknowledge();
            }
            Deed::Configuration(_)
            | Deed::Command(_)
            | Deed::SectionStart(_)
            | Deed::SectionEnd(_)
            | Deed::Step => {}
        }
        Ok(())
    }

    fn acknowledge(&mut self) {
        if self.has_return_path {
            self.say(&ReturnPathMessage::Shut(0));
        }
        self.saying = true;
    }

    fn say(&mut self, message: &ReturnPathMessage) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        self.answers.bytes(bytes);
    }
}
