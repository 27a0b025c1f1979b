//! The file header and the configuration section (QEMU `migration/savevm.c`, `vmstate_configuration`).
//!
//! ```text
//!   be32 "QEVM"  be32 3  u8 0x07  be32 n  n bytes of machine type   { u8 0x05  counted name  be32 1  fields }*
//! ```

use alloc::string::String;
use alloc::vec::Vec;

use crate::InvalidMessage;
use crate::error::check_length;
use crate::limits;
use crate::section::SectionType;
use crate::wire::{Reader, Stop, lossy, put_counted, put32};

/// "QEVM".
pub const MAGIC: u32 = 0x5145_564d;
/// The only stream version since 2007.
pub const VERSION: u32 = 3;
/// The capability that a mapped-ram file lists, and no other stream.
pub const MAPPED_RAM: &str = "mapped-ram";

const CAPABILITIES: &[u8] = b"configuration/capabilities";
const UUID: &[u8] = b"configuration/uuid";
const PAGE_BITS: &[u8] = b"configuration/target-page-bits";
const SUBSECTION_VERSION: u32 = 1;

/// Properties of the guest at the beginning of a stream.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Configuration {
    /// The versioned machine type, e.g. `pc-q35-10.0`.
    pub machine_type: String,
    /// The guest's page size as a power of two, where a target has several.
    pub target_page_bits: Option<u32>,
    /// Capabilities that both ends must have alike; QEMU lists only `x-ignore-shared` and `mapped-ram`.
    pub capabilities: Vec<String>,
    /// The VM's uuid, with the capability `validate-uuid`.
    pub uuid: Option<[u8; 16]>,
}

impl Configuration {
    /// True where the stream is a mapped-ram file's.
    pub fn is_mapped_ram(&self) -> bool {
        self.capabilities.iter().any(|name| name == MAPPED_RAM)
    }

    /// Appends the header and the section.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put32(out, MAGIC);
        put32(out, VERSION);
        out.push(SectionType::Configuration as u8);
        put32(out, u32::try_from(self.machine_type.len()).expect("a machine name is short"));
        out.extend_from_slice(self.machine_type.as_bytes());
        if let Some(bits) = self.target_page_bits {
            subsection(out, PAGE_BITS);
            put32(out, bits);
        }
        if !self.capabilities.is_empty() {
            subsection(out, CAPABILITIES);
            put32(out, u32::try_from(self.capabilities.len()).expect("bounded when it was read"));
            for name in &self.capabilities {
                put_counted(out, name.as_bytes());
            }
        }
        if let Some(uuid) = &self.uuid {
            subsection(out, UUID);
            out.extend_from_slice(uuid);
        }
    }
}

fn subsection(out: &mut Vec<u8>, name: &[u8]) {
    out.push(SectionType::Subsection as u8);
    put_counted(out, name);
    put32(out, SUBSECTION_VERSION);
}

/// Reads the file header.
pub(crate) fn decode_header(input: &mut Reader<'_>) -> Result<(), Stop> {
    match input.be32()? {
        MAGIC => {}
        found => return Err(InvalidMessage::Magic { found }.into()),
    }
    match input.be32()? {
        VERSION => Ok(()),
        found => Err(InvalidMessage::Version { found }.into()),
    }
}

/// Reads the section up to the end of the machine name.
pub(crate) fn decode_machine(input: &mut Reader<'_>) -> Result<String, Stop> {
    const EXPECTED: &str = "the configuration section";
    let kind = input.u8()?;
    if SectionType::decode(kind, EXPECTED)? != SectionType::Configuration {
        return Err(InvalidMessage::SectionType { found: kind, expected: EXPECTED }.into());
    }
    let length = input.be32()?;
    check_length("machine type name", length.into(), limits::MACHINE_NAME_BYTES_MAX)?;
    let name = input.take(length as usize)?;
    match core::str::from_utf8(name) {
        Ok(name) => Ok(name.into()),
        Err(_) => Err(InvalidMessage::Text { what: "machine type name", shown: lossy(name) }.into()),
    }
}

/// Reads one subsection, whose type byte was seen, into `configuration`.
pub(crate) fn decode_subsection(
    input: &mut Reader<'_>,
    configuration: &mut Configuration,
) -> Result<(), Stop> {
    input.u8()?;
    let (name, version) = (input.counted()?, input.be32()?);
    if version != SUBSECTION_VERSION {
        return Err(unknown(name).into());
    }
    match name {
        CAPABILITIES => configuration.capabilities = decode_capabilities(input)?,
        UUID => configuration.uuid = Some(input.array()?),
        PAGE_BITS => configuration.target_page_bits = Some(input.be32()?),
        _ => return Err(unknown(name).into()),
    }
    Ok(())
}

fn unknown(name: &[u8]) -> InvalidMessage {
    InvalidMessage::Text { what: "configuration subsection (unknown)", shown: lossy(name) }
}

fn decode_capabilities(input: &mut Reader<'_>) -> Result<Vec<String>, Stop> {
    let count = input.be32()?;
    check_length("capability list", count.into(), limits::CAPABILITIES_MAX)?;
    (0..count).map(|_| Ok(lossy(input.counted()?))).collect()
}
