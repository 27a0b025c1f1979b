//! The stream after the memory: device sections, EOF and the VM description, kept as one opaque run of bytes.
//!
//! ```text
//!   { u8 4  be32 id  counted name  be32 instance  be32 version  fields…  u8 0x7e  be32 id }*   u8 0   u8 6  be32 n  JSON
//! ```
//!
//! A device section does not state its length, so the end is found backwards: the stream ends with a
//! description. Its length leads exactly to the last byte received, it is JSON, and it lists exactly the
//! sections of the stream, each after the footer of the previous one. A source waits for SHUT after it, so
//! nothing follows. QEMU leaves the description out with `suppress-vmdesc=on` and after postcopy; such a
//! stream never completes here.
//!
//! Limits: a guest that writes a description of all sections so far, and a footer before it, into a device's
//! state can make its tail look complete where the bytes so far end with it. It harms itself only.

use alloc::borrow::Cow;
use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::json;

use crate::configuration::decode_header;
use crate::error::check_length;
use crate::limits;
use crate::ram::PAGE_SIZE;
use crate::section::{SectionHeader, SectionType, put_footer};
use crate::wire::{Reader, put_counted, put32};
use crate::{Error, InvalidMessage, Result};

/// EOF and the description's type byte.
const TAIL_HEAD: [u8; 2] = [SectionType::Eof as u8, SectionType::VmDescription as u8];
/// Bytes of the description's head: these and its length.
const TAIL_HEAD_BYTES: usize = TAIL_HEAD.len() + 4;
/// FULL and the section's id.
const SECTION_HEAD_BYTES: usize = 5;
/// The id of the first section that is written here; 2 is the memory's.
const FIRST_SECTION_ID: u32 = 3;
/// The text of a run state, padded with NUL.
const RUN_STATE_BYTES: usize = 100;
/// FOOTER and the section's id.
const FOOTER_BYTES: usize = 5;

/// A device of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSection {
    /// The idstr, e.g. `0000:00:01.0/virtio-net`.
    pub name: String,
    /// Distinguishes devices of one name.
    pub instance: u32,
    /// The version of its state.
    pub version: u32,
    /// Offset of its section in [`DeviceState::bytes`].
    pub offset: usize,
}

/// A guest's complete device state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState {
    bytes: Vec<u8>,
    devices: Vec<DeviceSection>,
    sections_end: usize,
}

impl DeviceState {
    /// Checks a whole tail, e.g. of a stored guest.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let mut collector = Collector::default();
        collector.push(bytes)?;
        collector.complete()?.ok_or_else(|| collector.truncated())
    }

    /// The state in a file of QEMU's `xen-save-devices-state`: a stream's header, the sections and EOF, without a description.
    /// The one that is added lists those devices of `known`, a state of the same guest, that the file has.
    ///
    /// # Errors
    /// The file is truncated, or has another format.
    pub fn of_saved(file: &[u8], known: &Self) -> Result<Self> {
        let truncated = InvalidMessage::Truncated { what: "the saved device state" };
        let mut input = Reader::new(file);
        input.whole(decode_header)?.ok_or_else(|| truncated.clone())?;
        let sections = file[input.position()..].strip_suffix(&[SectionType::Eof as u8]).ok_or(truncated)?;
        Self::of_sections(sections, &known.devices)
    }

    /// As [`Self::of_saved`], of sections alone. Takes time in proportion to their length.
    pub(crate) fn of_sections(sections: &[u8], known: &[DeviceSection]) -> Result<Self> {
        let devices = known_devices(sections, known);
        check_end(sections, &devices)?;
        let mut bytes = sections.to_vec();
        put_description(&mut bytes, devices.iter().map(|device| (device.name.as_str(), device.instance)));
        Ok(Self { bytes, devices, sections_end: sections.len() })
    }

    /// The sections, EOF and the description, as received.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The sections alone, as a postcopy package has them.
    pub fn sections(&self) -> &[u8] {
        &self.bytes[..self.sections_end]
    }

    /// The devices, in the stream's order.
    pub fn devices(&self) -> &[DeviceSection] {
        &self.devices
    }

    /// The payload of a device's section, between its header and its footer.
    pub fn content(&self, device: &DeviceSection) -> &[u8] {
        let start = device.offset + SECTION_HEAD_BYTES + 1 + device.name.len() + 8;
        let next = self.devices.iter().map(|other| other.offset).find(|&offset| offset > device.offset);
        let end = next.unwrap_or(self.sections_end) - FOOTER_BYTES;
        self.bytes.get(start..end).unwrap_or_default()
    }

    /// The guest's run state when it was stopped, in QEMU's words (`running`, `paused`), from the section
    /// `globalstate`: be32 size, then 100 bytes of text. `None` without such a section.
    pub fn run_state(&self) -> Option<&str> {
        let text = self.bytes.get(self.run_state_at()?..)?.get(..RUN_STATE_BYTES)?;
        let end = text.iter().position(|&byte| byte == 0)?;
        core::str::from_utf8(&text[..end]).ok()
    }

    /// Replaces the run state `running` by `paused`: a QEMU that loads this runs the guest only on a later
    /// `cont`, in spite of commands that it received while it loaded. Other run states stay.
    pub fn pause(&mut self) {
        if let (Some("running"), Some(at)) = (self.run_state(), self.run_state_at()) {
            // With its length, which counts the final NUL.
            self.bytes[at - 4..at + 8].copy_from_slice(b"\0\0\0\x07paused\0\0");
        }
    }

    /// Offset of the text of the run state.
    fn run_state_at(&self) -> Option<usize> {
        let device = self.devices.iter().find(|device| device.name == "globalstate")?;
        Some(device.offset + SECTION_HEAD_BYTES + 1 + device.name.len() + 8 + 4)
    }

    /// The device whose section holds byte `offset`; `None` past the sections.
    pub fn device_at(&self, offset: usize) -> Option<&DeviceSection> {
        let within = offset < self.sections_end;
        self.devices.iter().rev().find(|device| within && device.offset <= offset)
    }
}

/// Writes a tail with these sections, by name, version and content: for a source whose devices are not
/// QEMU's. Their instance is 0; a destination distinguishes them by their names.
///
/// # Panics
/// If a name is longer than 255 bytes.
pub fn encode(devices: &[(&str, u32, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (id, &(name, version, content)) in (FIRST_SECTION_ID..).zip(devices) {
        SectionHeader { id, name: name.into(), instance: 0, version }.encode(SectionType::Full, &mut bytes);
        bytes.extend_from_slice(content);
        put_footer(&mut bytes, id);
    }
    put_description(&mut bytes, devices.iter().map(|(name, ..)| (*name, 0)));
    bytes
}

/// Appends EOF and a description of these devices, by name and instance.
fn put_description<'a>(bytes: &mut Vec<u8>, devices: impl Iterator<Item = (&'a str, u32)>) {
    let listed: Vec<_> =
        devices.map(|(name, instance)| json!({ "name": name, "instance_id": instance })).collect();
    let description = json!({ "page_size": PAGE_SIZE, "devices": listed }).to_string();
    bytes.extend_from_slice(&TAIL_HEAD);
    put32(bytes, u32::try_from(description.len()).expect("a line for each device"));
    bytes.extend_from_slice(description.as_bytes());
}

/// Gathers the tail as it comes.
///
/// Only the last byte sequence that looks like the beginning of a description can be one: JSON has no NUL
/// byte, so nothing in the description looks like another. Hence nothing is kept of those before it.
#[derive(Debug, Default)]
pub struct Collector {
    bytes: Vec<u8>,
    /// Position up to which descriptions were searched.
    searched: usize,
    /// The last possible description: its offset, and the length of the tail that it would complete.
    candidate: Option<(usize, usize)>,
    /// Number of descriptions that do not fit these sections, and the fault of the last one.
    refusals: usize,
    refused: Option<InvalidMessage>,
}

impl Collector {
    /// Takes more bytes.
    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        let length = (self.bytes.len() + bytes.len()) as u64;
        check_length("device state", length, limits::DEVICE_STATE_BYTES_MAX)?;
        self.bytes.extend_from_slice(bytes);
        self.search();
        Ok(())
    }

    /// Number of bytes received.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// True before the first byte.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The device state, if it is complete with the bytes so far.
    ///
    /// A description that does not fit the sections is not an error yet: a guest can write one into a device,
    /// and the result must not depend on how the bytes are split. [`Self::truncated`] reports it if nothing
    /// else follows.
    ///
    /// # Errors
    /// Too many descriptions that do not fit.
    pub fn complete(&mut self) -> Result<Option<DeviceState>> {
        let total = self.bytes.len();
        let Some((start, _)) = self.candidate.take_if(|(_, end)| *end == total) else { return Ok(None) };
        match devices(&self.bytes, start) {
            Ok(devices) => {
                let bytes = core::mem::take(self).bytes;
                Ok(Some(DeviceState { bytes, devices, sections_end: start }))
            }
            Err(error) => {
                self.refusals += usize::from(matches!(error, InvalidMessage::DeviceMissing { .. }));
                self.refused = Some(error.clone());
                if self.refusals <= limits::DESCRIPTIONS_MAX { Ok(None) } else { Err(error.into()) }
            }
        }
    }

    /// The error if nothing follows: the fault of the last description, or its absence.
    pub fn truncated(&self) -> Error {
        let nothing = InvalidMessage::Truncated { what: "the device state" };
        self.refused.clone().unwrap_or(nothing).into()
    }

    fn search(&mut self) {
        // The last offset at which a head and one more byte fit.
        let Some(last) = self.bytes.len().checked_sub(TAIL_HEAD_BYTES) else { return };
        let mut at = self.searched;
        self.searched = last;
        while let Some(skipped) = find(&self.bytes[..last + 1], at, &TAIL_HEAD) {
            at = skipped + 1;
            let mut length = Reader::new(&self.bytes[skipped + TAIL_HEAD.len()..]);
            let length = length.be32().expect("six bytes are there") as usize;
            let end = skipped + TAIL_HEAD_BYTES + length;
            if end <= limits::DEVICE_STATE_BYTES_MAX && self.bytes[skipped + TAIL_HEAD_BYTES] == b'{' {
                self.candidate = Some((skipped, end));
            }
        }
    }
}

/// The required parts of the description. The rest of it is checked to be JSON and not kept.
#[derive(Deserialize)]
struct Description<'a> {
    #[serde(borrow)]
    devices: Listed<'a>,
}

#[derive(Deserialize)]
struct ListedDevice<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    instance_id: u32,
}

/// The devices, never more than the limit while they are read.
struct Listed<'a>(Vec<ListedDevice<'a>>);

impl<'de: 'a, 'a> Deserialize<'de> for Listed<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListedVisitor)
    }
}

struct ListedVisitor;

impl<'de> Visitor<'de> for ListedVisitor {
    type Value = Listed<'de>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "a list of at most {} devices", limits::DEVICES_MAX)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut listed = Vec::new();
        while let Some(device) = entries.next_element()? {
            if listed.len() == limits::DEVICES_MAX {
                return Err(de::Error::invalid_length(listed.len() + 1, &self));
            }
            listed.push(device);
        }
        Ok(Listed(listed))
    }
}

/// Reads the description at `sections_end` and finds each device that it lists.
fn devices(bytes: &[u8], sections_end: usize) -> Result<Vec<DeviceSection>, InvalidMessage> {
    let text = &bytes[sections_end + TAIL_HEAD_BYTES..];
    let description: Description<'_> =
        serde_json::from_slice(text).map_err(|error| InvalidMessage::Description(error.to_string()))?;
    let Listed(listed) = description.devices;
    let sections = &bytes[..sections_end];
    let mut devices: Vec<DeviceSection> = Vec::with_capacity(listed.len());
    for entry in listed {
        let device = locate(sections, devices.last(), &entry)?;
        devices.push(device);
    }
    check_end(sections, &devices)?;
    Ok(devices)
}

/// Checks that the footer of the last device ends the sections.
fn check_end(sections: &[u8], devices: &[DeviceSection]) -> Result<(), InvalidMessage> {
    match devices.last() {
        Some(last) if footer_before(sections, sections.len(), section_id(sections, last.offset)) => Ok(()),
        Some(last) => Err(missing(&last.name, last.instance)),
        None if sections.is_empty() => Ok(()),
        None => Err(missing("", 0)),
    }
}

/// The sections of those of the `known` devices that are here, in their order.
fn known_devices(sections: &[u8], known: &[DeviceSection]) -> Vec<DeviceSection> {
    let places: BTreeMap<_, _> = known
        .iter()
        .enumerate()
        .map(|(place, device)| ((device.name.as_str(), device.instance), place))
        .collect();
    let (mut devices, mut next_place) = (Vec::<DeviceSection>::new(), 0);
    let mut candidate = Some(0);
    while let Some(offset) = candidate {
        let header =
            sections.get(offset + 1..).and_then(|bytes| SectionHeader::decode(&mut Reader::new(bytes)).ok());
        let found = header.filter(|_| sections[offset] == SectionType::Full as u8).and_then(|header| {
            let place = *places
                .get(&(header.name.as_str(), header.instance))
                .filter(|&&place| place >= next_place)?;
            next_place = place + 1;
            Some(DeviceSection {
                name: header.name,
                instance: header.instance,
                version: header.version,
                offset,
            })
        });
        devices.extend(found);
        let Some(last) = devices.last() else { break };
        let footer = find(sections, offset + 1, &separator(section_id(sections, last.offset)));
        candidate = footer.map(|at| at + FOOTER_BYTES);
    }
    devices
}

/// The footer of a section, and the beginning of the next one.
fn separator(id: u32) -> [u8; FOOTER_BYTES + 1] {
    let mut separator = [SectionType::Footer as u8, 0, 0, 0, 0, SectionType::Full as u8];
    separator[1..FOOTER_BYTES].copy_from_slice(&id.to_be_bytes());
    separator
}

/// Finds the section of a listed device: the first at the beginning, others after the footer of the one
/// `before`.
fn locate(
    sections: &[u8],
    before: Option<&DeviceSection>,
    entry: &ListedDevice<'_>,
) -> Result<DeviceSection, InvalidMessage> {
    let (name, instance) = (&*entry.name, entry.instance_id);
    if name.len() > limits::NAME_BYTES_MAX {
        return Err(InvalidMessage::Description("a device name of more than 255 bytes".into()));
    }
    let mut wanted = Vec::new();
    put_counted(&mut wanted, name.as_bytes());
    put32(&mut wanted, instance);
    let at = |offset: usize| {
        let header = sections.get(offset + SECTION_HEAD_BYTES..)?.strip_prefix(&wanted[..])?;
        let version = Reader::new(header).be32().ok()?;
        let full = sections[offset] == SectionType::Full as u8;
        full.then(|| DeviceSection { name: name.into(), instance, version, offset })
    };
    let found = match before {
        None => at(0),
        Some(before) => {
            let separator = separator(section_id(sections, before.offset));
            let mut from = before.offset + SECTION_HEAD_BYTES;
            core::iter::from_fn(|| {
                let footer = find(sections, from, &separator)?;
                from = footer + 1;
                Some(footer + FOOTER_BYTES)
            })
            .find_map(at)
        }
    };
    found.ok_or_else(|| missing(name, instance))
}

fn missing(name: &str, instance: u32) -> InvalidMessage {
    InvalidMessage::DeviceMissing { name: name.into(), instance }
}

fn find(bytes: &[u8], from: usize, wanted: &[u8]) -> Option<usize> {
    bytes.get(from..)?.windows(wanted.len()).position(|window| window == wanted).map(|at| from + at)
}

/// The id of the section that begins at `offset`.
fn section_id(bytes: &[u8], offset: usize) -> u32 {
    Reader::new(bytes.get(offset + 1..).unwrap_or_default()).be32().unwrap_or_default()
}

fn footer_before(bytes: &[u8], end: usize, id: u32) -> bool {
    let Some(footer) = end.checked_sub(FOOTER_BYTES).and_then(|start| bytes.get(start..end)) else {
        return false;
    };
    footer[0] == SectionType::Footer as u8 && footer[1..] == id.to_be_bytes()
}
