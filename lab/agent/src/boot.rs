//! Set-up of an init: mounts and modules.

use std::ffi::CStr;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, mount};

/// Modules to load, one file a line, in the order of their dependencies. Written by `cargo xtask setup`.
const MODULES: &str = "/modules/order";
const VIRTIO_VENDOR: &str = "0x1af4";

pub(crate) fn mount_all() -> Result<()> {
    for (kind, place) in
        [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/tmp"), ("tmpfs", "/run")]
    {
        fs::create_dir_all(place)?;
        mount(kind, place, kind, MountFlags::empty(), None::<&CStr>)
            .with_context(|| format!("{kind} cannot be mounted on {place}"))?;
    }
    Ok(())
}

/// Loads the modules if the machine has a virtio device; otherwise they would only cost time.
pub(crate) fn load_modules() {
    if !has_virtio() {
        return;
    }
    for name in fs::read_to_string(MODULES).unwrap_or_default().lines() {
        let path = Path::new(MODULES).with_file_name(name);
        let loaded = fs::File::open(&path)
            .map_err(anyhow::Error::from)
            .and_then(|file| Ok(rustix::system::finit_module(file, c"", 0)?));
        if let Err(error) = loaded {
            eprintln!("agent: {} cannot be loaded: {error:#}", path.display());
        }
    }
}

fn has_virtio() -> bool {
    let Ok(devices) = fs::read_dir("/sys/bus/pci/devices") else { return false };
    devices.flatten().any(|device| {
        fs::read_to_string(device.path().join("vendor")).is_ok_and(|vendor| vendor.trim() == VIRTIO_VENDOR)
    })
}
