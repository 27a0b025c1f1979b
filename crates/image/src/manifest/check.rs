//! Checks that a manifest is consistent and belongs to its image.

use std::fmt::Display;
use std::path::Path;

use towline_protocol::limits;
use towline_protocol::ram::PAGE_SIZE;

use super::text::truncated;
use super::{
    Digest, Error, ImageProperties, Manifest, OverlongField, PATH_BYTES_MAX, Result, StoredBlock, VERSION,
    sidecar_path,
};
use crate::checksum::CHUNK_BYTES;
use crate::journal::{self, PublicationBug};

impl Manifest {
    /// Checks that the manifest belongs to `image` with these properties, and that the device state is the
    /// stored one.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, image: &Path, found: &ImageProperties<'_>) -> Result<()> {
        let path = sidecar_path(image);
        self.check_guest(&path, found)?;
        let (length, expected) = (found.image_bytes, self.image.length);
        if length != expected {
            return Err(Error::ImageLength { path, image: image.into(), found: length, expected });
        }
        let expected = self.image.identity;
        let identity = |state| Digest::identity(found.head, found.blocks, state);
        if identity(self.device_state.blake3) == expected {
            return self.verify_device_state(image, found.device_state);
        }
        let found = identity(Digest::of(found.device_state));
        Err(Error::OtherImage { path, image: image.into(), found, expected })
    }

    /// Compares the seal in the image with the hash of the manifest's text, which was read at `path`.
    ///
    /// # Errors
    /// [`Error::Seal`] and [`Error::NoSeal`].
    pub(crate) fn check_seal(
        &self,
        image: &Path,
        path: &Path,
        text: Digest,
        found: &ImageProperties<'_>,
    ) -> Result<()> {
        let (path, image) = (path.to_owned(), image.to_owned());
        match (found.seal, self.image.seal) {
            _ if journal::is_on(PublicationBug::SealIgnored) => Ok(()),
            (Some(expected), _) if expected != text => {
                Err(Error::Seal { path, image, found: text, expected })
            }
            (None, Some(offset)) => Err(Error::NoSeal { path, image, offset }),
            _ => Ok(()),
        }
    }

    /// Compares a block's page bitmap with the manifest.
    ///
    /// # Errors
    /// [`Error::Bitmap`], [`Error::PageCount`].
    pub(crate) fn check_bitmap(&self, image: &Path, block: usize, bitmap: &[u8]) -> Result<()> {
        let stored = &self.blocks[block];
        let (path, image, block) = (sidecar_path(image), image.into(), stored.name.clone());
        let found = Digest::of(bitmap);
        if let Some(expected) = stored.bitmap.filter(|expected| *expected != found) {
            let (found, expected) = (Box::new(found), Box::new(expected));
            return Err(Error::Bitmap { path, image, block, found, expected });
        }
        let found = bitmap.iter().map(|byte| u64::from(byte.count_ones())).sum();
        let expected = stored.pages_plain;
        if found == expected { Ok(()) } else { Err(Error::PageCount { path, image, block, found, expected }) }
    }

    /// Compares the hash of the device state with that of `bytes`.
    ///
    /// # Errors
    /// [`Error::DeviceState`].
    pub fn verify_device_state(&self, image: &Path, bytes: &[u8]) -> Result<()> {
        let (found, expected) = (Digest::of(bytes), self.device_state.blake3);
        if found == expected {
            return Ok(());
        }
        let (place, found) = (self.changed_device(bytes), Box::new(found));
        Err(Error::DeviceState { path: sidecar_path(image), image: image.into(), place, found, expected })
    }

    /// Names the only device whose state differs; empty if several do or the hashes are missing.
    fn changed_device(&self, bytes: &[u8]) -> String {
        let state = &self.device_state;
        let ends = state.devices.iter().skip(1).map(|device| device.offset).chain([state.length]);
        let mut changed = state.devices.iter().zip(ends).filter(|(device, end)| {
            let part = bytes.get(device.offset as usize..*end as usize);
            device.blake3.is_none() || part.map(Digest::of) != device.blake3
        });
        match (changed.next(), changed.next()) {
            (Some((device, _)), None) if device.blake3.is_some() => format!(
                ", in device {:?} (instance {}, from byte {:#x} of the file)",
                device.name,
                device.instance,
                state.offset + device.offset
            ),
            _ => String::new(),
        }
    }

    fn check_guest(&self, path: &Path, found: &ImageProperties<'_>) -> Result<()> {
        let differs = |field: String, found: &dyn Display, expected: &dyn Display| {
            let (found, expected) = (truncated(&found.to_string()), truncated(&expected.to_string()));
            Err(Error::Differs { path: path.into(), field, found, expected })
        };
        if self.machine_type != found.machine_type {
            return differs("machine_type".into(), &self.machine_type, &found.machine_type);
        }
        if self.blocks.len() != found.blocks.len() {
            return differs("blocks".into(), &entries(self.blocks.len()), &entries(found.blocks.len()));
        }
        for (index, (block, expected)) in self.blocks.iter().zip(found.blocks).enumerate() {
            if block.name != expected.name {
                return differs(format!("blocks[{index}].name"), &block.name, &expected.name);
            }
            if block.length != expected.length {
                return differs(format!("blocks[{index}].length"), &block.length, &expected.length);
            }
        }
        Ok(())
    }

    /// Checks each field against the others and the protocol's limits.
    pub(super) fn check_fields(&self, path: &Path) -> Result<()> {
        let machine_type = self.machine_type.len();
        check_length(path, "machine_type", machine_type, limits::MACHINE_NAME_BYTES_MAX, "bytes")?;
        if let Some(base) = &self.base {
            if self.version < VERSION {
                let expected = format!("none in version {}", self.version);
                return Err(Error::field(path, "base".into(), "there", expected));
            }
            if base.path.is_empty() || base.path.len() > PATH_BYTES_MAX {
                let found = format!("{} bytes long", base.path.len());
                let expected = format!("1 to {PATH_BYTES_MAX} bytes");
                return Err(Error::field(path, "base.path".into(), found, expected));
            }
        }
        if let Some(OverlongField { name, found, limit }) = self.origin.overlong_field() {
            check_length(path, name, found, limit, "bytes")?;
        }
        if self.chunk_size != CHUNK_BYTES {
            return Err(Error::field(path, "chunk_size".into(), self.chunk_size, CHUNK_BYTES));
        }
        check_length(path, "blocks", self.blocks.len(), limits::BLOCKS_MAX, "entries")?;
        let mut left = limits::RAM_BYTES_MAX.min(self.image.length);
        for (index, block) in self.blocks.iter().enumerate() {
            block.check(path, index, left)?;
            left -= block.length;
        }
        self.check_devices(path)
    }

    fn check_devices(&self, path: &Path) -> Result<()> {
        let state = &self.device_state;
        let bad = |field: &str, found: &dyn Display, expected: &dyn Display| {
            Err(Error::field(path, format!("device_state.{field}"), found, expected))
        };
        let limit = limits::DEVICE_STATE_BYTES_MAX as u64;
        if state.length > limit {
            return bad("length", &state.length, &at_most(limit, "bytes"));
        }
        // The sum must not overflow for any length.
        if state.offset.checked_add(state.length).is_none_or(|end| end > self.image.length) {
            let expected = at_most(self.image.length.saturating_sub(state.length), "(the end of the image)");
            return bad("offset", &state.offset, &expected);
        }
        let devices = state.devices.len();
        check_length(path, "device_state.devices", devices, limits::DEVICES_MAX, "entries")?;
        let mut least = 0;
        for (index, device) in state.devices.iter().enumerate() {
            let name = format_args!("device_state.devices[{index}].name");
            check_length(path, name, device.name.len(), limits::NAME_BYTES_MAX, "bytes")?;
            if device.offset < least || device.offset >= state.length {
                let expected = format!("{least} or more and less than {}", state.length);
                return bad(&format!("devices[{index}].offset"), &device.offset, &expected);
            }
            least = device.offset + 1;
        }
        Ok(())
    }
}

impl StoredBlock {
    /// `left` is the maximum length of this block.
    fn check(&self, path: &Path, index: usize, left: u64) -> Result<()> {
        let bad = |field: &str, found: &dyn Display, expected: &dyn Display| {
            Err(Error::field(path, format!("blocks[{index}].{field}"), found, expected))
        };
        if self.name.len() > limits::NAME_BYTES_MAX {
            let expected = at_most(limits::NAME_BYTES_MAX as u64, "bytes");
            return bad(
                "name",
                &format!("{} bytes long ({:?})", self.name.len(), truncated(&self.name)),
                &expected,
            );
        }
        if self.length > left {
            return bad("length", &self.length, &at_most(left, "bytes, which the image has for it"));
        }
        if !self.length.is_multiple_of(PAGE_SIZE) {
            return bad("length", &self.length, &format!("a multiple of {PAGE_SIZE}"));
        }
        let pages = self.length / PAGE_SIZE;
        if self.pages_plain.checked_add(self.pages_zero) != Some(pages) {
            let found = format!("{} beside {} plain ones", self.pages_zero, self.pages_plain);
            return bad("pages_zero", &found, &format!("{pages} together"));
        }
        let chunks = self.length.div_ceil(CHUNK_BYTES);
        if self.chunks.len() as u64 != chunks {
            return bad(
                "chunks",
                &entries(self.chunks.len()),
                &format!("{chunks}, one for each {CHUNK_BYTES} bytes"),
            );
        }
        Ok(())
    }
}

/// Compares a length with its limit.
fn check_length(path: &Path, field: impl Display, found: usize, limit: usize, unit: &str) -> Result<()> {
    if found <= limit {
        return Ok(());
    }
    let expected = at_most(limit as u64, unit);
    Err(Error::field(path, field.to_string(), format!("{found} {unit} long"), expected))
}

fn entries(count: usize) -> String {
    format!("{count} entries long")
}

fn at_most(limit: u64, unit: &str) -> String {
    format!("at most {limit} {unit}")
}
