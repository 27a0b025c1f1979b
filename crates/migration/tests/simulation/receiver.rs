//! The reading half of a destination and of a relay: the real decoders, fed by links, and the rules of the
//! lanes' barrier.

use towline_protocol::configuration::Configuration;
use towline_protocol::destination::{Barriers, RamSection, SectionKind, StreamDecoder, StreamItem};
use towline_protocol::device_state::{Collector, DeviceState};
use towline_protocol::multifd::{HEADER_BYTES, INIT_BYTES, Init, LaneRegistry, Packet};
use towline_protocol::section::VmCommand;
use towline_protocol::{PageRef, RamBlock, Reader};

use super::guest::PAGE;
use super::net::{Net, Port};

/// Bytes received ahead on the main channel.
const AHEAD: usize = 3 * PAGE;

/// The next message of the main channel.
#[derive(Debug)]
pub(crate) enum Deed {
    Configuration(Configuration),
    Command(VmCommand),
    Blocks(Vec<RamBlock>),
    SectionStart(RamSection),
    SectionEnd(SectionKind),
    Page(PageRef, Vec<u8>),
    Zero(PageRef),
    Xbzrle(PageRef, Vec<u8>),
    /// All lanes have arrived, and continue.
    Barrier,
    DeviceState(DeviceState),
    /// Nothing for anybody else.
    Step,
}

/// A packet with the contents of its pages.
pub(crate) type Taken = (Packet, Vec<u8>);

#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) main: Port,
    pub(crate) blocks: Vec<RamBlock>,
    lanes: Vec<Lane>,
    machine: StreamDecoder,
    input: Vec<u8>,
    /// A page whose bytes come next.
    page: Option<PageRef>,
    collector: Option<Collector>,
    barriers: Barriers,
    registry: LaneRegistry,
    total: u64,
    /// The main channel waits for the lanes; its message afterwards.
    leading: Option<Deed>,
    is_complete: bool,
}

#[derive(Debug)]
struct Lane {
    port: Port,
    input: Vec<u8>,
    is_known: bool,
    packet: Option<Packet>,
    at_barrier: bool,
    /// Pages came since the last barrier.
    outstanding: bool,
}

impl Lane {
    /// Bytes up to the end of what is read now.
    fn wanted(&self) -> usize {
        match &self.packet {
            _ if !self.is_known => INIT_BYTES,
            None => HEADER_BYTES,
            Some(packet) => packet.data_bytes as usize,
        }
    }
}

impl Receiver {
    pub(crate) fn new(main: Port, lanes: &[Port]) -> Self {
        let lane = |&port| Lane {
            port,
            input: Vec::new(),
            is_known: false,
            packet: None,
            at_barrier: false,
            outstanding: false,
        };
        Self {
            main,
            blocks: Vec::new(),
            lanes: lanes.iter().map(lane).collect(),
            machine: StreamDecoder::default(),
            input: Vec::new(),
            page: None,
            collector: None,
            barriers: Barriers::default(),
            registry: LaneRegistry::new(lanes.len()),
            total: 0,
            leading: None,
            is_complete: false,
        }
    }

    pub(crate) fn ports(&self) -> Vec<Port> {
        std::iter::once(self.main).chain(self.lanes.iter().map(|lane| lane.port)).collect()
    }

    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// The main channel waits for the lanes.
    pub(crate) fn is_leading(&self) -> bool {
        self.leading.is_some()
    }

    /// One step of the main channel's thread; `None`: it waits.
    pub(crate) fn step_main(&mut self, net: &mut Net) -> Result<Option<Deed>, String> {
        if self.is_complete {
            return Ok(None);
        }
        if self.leading.is_some() {
            if !self.lanes.iter().all(|lane| lane.at_barrier) {
                return Ok(None);
            }
            for lane in &mut self.lanes {
                (lane.at_barrier, lane.outstanding) = (false, false);
            }
            return Ok(Some(Deed::Barrier));
        }
        if let Some(collector) = &mut self.collector {
            if let Some(state) = collector.complete().map_err(|error| error.to_string())? {
                if self.lanes.iter().any(|lane| lane.outstanding && !lane.at_barrier) {
                    return Err("pages arrived after the last barrier".into());
                }
                self.is_complete = true;
                return Ok(Some(Deed::DeviceState(state)));
            }
            let more = self.receive(net)?;
            let collector = self.collector.as_mut().expect("just seen");
            collector.push(&std::mem::take(&mut self.input)).map_err(|error| error.to_string())?;
            return Ok(more.then_some(Deed::Step));
        }
        match self.decode()? {
            Some(deed) => Ok(Some(deed)),
            None => Ok(self.receive(net)?.then_some(Deed::Step)),
        }
    }

    /// The message that the barrier delayed, once the owner has passed it too.
    pub(crate) fn after_barrier(&mut self) -> Deed {
        self.leading.take().unwrap_or(Deed::Step)
    }

    fn receive(&mut self, net: &mut Net) -> Result<bool, String> {
        let room = AHEAD.saturating_sub(self.input.len()).max(1);
        match net.recv(self.main, room) {
            Ok(None) => Ok(false),
            Ok(Some(bytes)) => {
                self.input.extend(bytes);
                Ok(true)
            }
            Err(gone) => Err(format!("main channel: {gone:?} while {} was awaited", self.machine.awaits())),
        }
    }

    fn decode(&mut self) -> Result<Option<Deed>, String> {
        if let Some(page) = self.page {
            if self.input.len() < PAGE {
                return Ok(None);
            }
            self.page = None;
            return Ok(Some(Deed::Page(page, self.input.drain(..PAGE).collect())));
        }
        let mut reader = Reader::new(&self.input);
        let machine = std::mem::take(&mut self.machine);
        let (machine, event) = machine.handle(&mut reader).map_err(|error| error.to_string())?;
        self.machine = machine;
        let taken = reader.position();
        let deed = match event {
            None => None,
            Some(StreamItem::Page(page)) => {
                self.page = Some(page);
                Some(Deed::Step)
            }
            Some(StreamItem::ZeroPage(page)) => Some(Deed::Zero(page)),
            Some(StreamItem::Xbzrle { page, data }) => Some(Deed::Xbzrle(page, data)),
            Some(StreamItem::Configuration(configuration)) => Some(Deed::Configuration(configuration)),
            Some(StreamItem::Command(command)) => Some(Deed::Command(command)),
            Some(StreamItem::SectionStart(section)) => Some(Deed::SectionStart(section)),
            Some(StreamItem::Total(total)) => {
                self.total = total;
                Some(Deed::Step)
            }
            Some(StreamItem::Block(_)) => Some(self.block()),
            Some(StreamItem::Flush) => {
                self.barriers.on_flush_record();
                self.leading = Some(Deed::Step);
                Some(Deed::Step)
            }
            Some(StreamItem::SectionEnd(section)) => Some(self.section_end(section.kind)),
            Some(StreamItem::DeviceState) => {
                self.collector = Some(Collector::default());
                Some(Deed::Step)
            }
        };
        self.input.drain(..taken);
        if let Some(collector) = &mut self.collector {
            collector.push(&std::mem::take(&mut self.input)).map_err(|error| error.to_string())?;
        }
        Ok(deed)
    }

    fn block(&mut self) -> Deed {
        let blocks = self.machine.blocks();
        if blocks.iter().map(|block| block.length).sum::<u64>() < self.total {
            return Deed::Step;
        }
        self.blocks = blocks.to_vec();
        Deed::Blocks(self.blocks.clone())
    }

    fn section_end(&mut self, kind: SectionKind) -> Deed {
        if self.lanes.is_empty() || !self.barriers.on_section_end() {
            return Deed::SectionEnd(kind);
        }
        self.leading = Some(Deed::SectionEnd(kind));
        Deed::Step
    }

    /// One step of a lane's thread: a packet with the contents of its pages, or whether anything came.
    pub(crate) fn step_lane(&mut self, net: &mut Net, index: usize) -> Result<(bool, Option<Taken>), String> {
        let lane = &mut self.lanes[index];
        if lane.at_barrier || self.is_complete {
            return Ok((false, None));
        }
        let missing = lane.wanted() - lane.input.len();
        if missing > 0 {
            match net.recv(lane.port, missing) {
                Ok(None) => return Ok((false, None)),
                Ok(Some(bytes)) => lane.input.extend(bytes),
                Err(gone) => return Err(format!("lane {index}: {gone:?}")),
            }
            return Ok((true, None));
        }
        let bytes = std::mem::take(&mut lane.input);
        if !lane.is_known {
            let init =
                Init::decode(bytes[..].try_into().expect("as wanted")).map_err(|error| error.to_string())?;
            let admitted = self.registry.register(&init).map_err(|error| error.to_string())?;
            assert_eq!(admitted, index);
            lane.is_known = true;
            return Ok((true, None));
        }
        let packet = match lane.packet.take() {
            Some(packet) => return Ok((true, Some(Self::taken(lane, packet, bytes)))),
            None => Packet::decode(bytes[..].try_into().expect("as wanted"), &self.blocks),
        };
        let packet = packet.map_err(|error| format!("lane {index}: {error}"))?;
        lane.outstanding |= packet.block.is_some();
        if packet.data_bytes > 0 {
            lane.packet = Some(packet);
            return Ok((true, None));
        }
        Ok((true, Some(Self::taken(lane, packet, Vec::new()))))
    }

    fn taken(lane: &mut Lane, packet: Packet, contents: Vec<u8>) -> Taken {
        lane.at_barrier = packet.sync;
        (packet, contents)
    }
}
