//! Facts about one side, and their JSON.
//!
//! ```text
//! { "format": "towline-facts", "version": 1, "made-by": "towline 0.1.0",
//!   "subject": { "kind": "qemu" | "binary" | "image" | "device" | "attribute", … } }
//! ```
//! The output of a QEMU binary's `-dump-vmstate` is read as well.

mod binary;
mod device;
mod error;
mod format;
mod image;
mod qemu;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::limits;

pub use binary::{BinaryFacts, Field, StateFormat};
pub use device::{AttributeFacts, DeviceFacts};
pub use error::Error;
use error::at_most;
pub use format::{FORMAT, VERSION};
pub use image::{ImageFacts, Section};
pub(crate) use qemu::version_numbers;
pub use qemu::{
    BlockFacts, Cpu, Drive, FeatureWord, IncomingState, Lock, MemoryBackend, Netdev, QemuDevice, QemuFacts,
    Virtio, Virtqueue,
};

/// Facts about one side.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Facts {
    /// [`FORMAT`].
    format: String,
    /// [`VERSION`].
    version: u32,
    /// The program that collected them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_by: Option<String>,
    /// The subject of the facts.
    pub subject: Subject,
}

/// The subject of the facts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Subject {
    /// A running or waiting QEMU.
    Qemu(Box<QemuFacts>),
    /// A QEMU binary, for one machine type.
    Binary(BinaryFacts),
    /// A stored guest.
    Image(ImageFacts),
    /// A towline device.
    Device(DeviceFacts),
    /// A device that offers a `migration_version` attribute.
    Attribute(AttributeFacts),
}

impl Subject {
    /// Name of the kind of subject, for messages.
    pub fn noun(&self) -> &'static str {
        match self {
            Self::Qemu(_) => "a QEMU",
            Self::Binary(_) => "a QEMU binary",
            Self::Image(_) => "an image",
            Self::Device(_) => "a device",
            Self::Attribute(_) => "a migration_version attribute",
        }
    }
}

impl From<Subject> for Facts {
    fn from(subject: Subject) -> Self {
        let made_by = Some(format!("towline {}", env!("CARGO_PKG_VERSION")));
        Self { format: FORMAT.into(), version: VERSION, made_by, subject }
    }
}

impl Facts {
    /// Reads facts, or the dump of a QEMU binary.
    ///
    /// # Errors
    /// [`Error`].
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        if bytes.len() > limits::FACTS_BYTES_MAX {
            return Err(Error::TooLong { found: bytes.len() });
        }
        let value: Value = serde_json::from_slice(bytes)?;
        if value.get(binary::DUMP_KEY).is_some() {
            return Ok(Subject::Binary(BinaryFacts::of_dump(&value)?).into());
        }
        let format = value.get("format").and_then(Value::as_str).unwrap_or_default();
        if format != FORMAT {
            return Err(Error::Format { found: format.chars().take(64).collect() });
        }
        let version = value.get("version").and_then(Value::as_u64).unwrap_or_default();
        if version == 0 || version > u64::from(VERSION) {
            return Err(Error::Version { found: u32::try_from(version).unwrap_or(u32::MAX) });
        }
        let facts: Self = serde_json::from_value(value)?;
        facts.check()?;
        Ok(facts)
    }

    /// The text that [`Facts::parse`] reads.
    ///
    /// # Panics
    /// Never: facts contain nothing that JSON cannot represent.
    pub fn to_json(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).expect("maps with text keys, numbers and text");
        text.push(b'\n');
        text
    }

    /// Facts about a QEMU, if it is the subject.
    pub fn qemu(&self) -> Option<&QemuFacts> {
        match &self.subject {
            Subject::Qemu(qemu) => Some(qemu),
            _ => None,
        }
    }

    fn check(&self) -> Result<(), Error> {
        match &self.subject {
            Subject::Qemu(qemu) => qemu.check(),
            Subject::Binary(binary) => binary.check(),
            Subject::Image(image) => image.check(),
            Subject::Device(device) => at_most("features", device.features.len(), limits::ENTRIES_MAX),
            Subject::Attribute(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Facts {
        Subject::Image(ImageFacts { machine: "pc-q35-10.0".into(), ..ImageFacts::default() }).into()
    }

    #[test]
    fn facts_written_are_read_back() {
        let facts = image();
        assert_eq!(Facts::parse(&facts.to_json()).unwrap(), facts);
        let qemu = QemuFacts { machine: "pc-q35-7.2".into(), uuid: Some("u".into()), ..QemuFacts::default() };
        let facts: Facts = Subject::Qemu(Box::new(qemu)).into();
        assert_eq!(Facts::parse(&facts.to_json()).unwrap(), facts);
    }

    #[test]
    fn unknown_keys_are_ignored_and_newer_versions_refused() {
        let mut value: Value = serde_json::from_slice(&image().to_json()).unwrap();
        value["subject"]["later"] = 1.into();
        value["also"] = "later".into();
        assert_eq!(Facts::parse(value.to_string().as_bytes()).unwrap(), image());
        value["version"] = 2.into();
        let error = Facts::parse(value.to_string().as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("facts of version 2, this towline knows 1"), "{error}");
    }

    #[test]
    fn other_text_is_named() {
        let error = Facts::parse(b"{\"format\":\"towline-image\"}").unwrap_err().to_string();
        assert!(error.contains("\"towline-image\", expected \"towline-facts\""), "{error}");
        assert!(matches!(Facts::parse(b"QEVM"), Err(Error::Json(_))));
        let long = vec![b' '; limits::FACTS_BYTES_MAX + 1];
        assert!(matches!(Facts::parse(&long), Err(Error::TooLong { .. })));
        let block = BlockFacts { name: "a".into(), ..BlockFacts::default() };
        let image = ImageFacts { blocks: vec![block; limits::ENTRIES_MAX + 1], ..ImageFacts::default() };
        let error = Facts::parse(&Facts::from(Subject::Image(image)).to_json()).unwrap_err();
        assert!(matches!(error, Error::TooMany { what: "RAM blocks", .. }), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..256)) {
            let _ = Facts::parse(&bytes);
        }
    }
}
