//! The guests' first file system, one for each kernel: the agent as init, busybox, and the modules for virtio, vsock and taps.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use towline_lab::cpio::{Archive, DeviceNumber};
use towline_lab::{Kernel, paths};

use super::modules;
use crate::command::{cargo, root, run};

/// Modules that a guest with virtio devices gets, with whatever they need.
const MODULES: [&str; 9] = [
    "virtio_pci",
    "virtio_net",
    "virtio_blk",
    "virtio_balloon",
    "virtio_mem",
    "virtio_rng",
    "vmw_vsock_virtio_transport",
    "8021q",
    "tun",
];
/// Commands of busybox that scripts call by name.
const APPLETS: [&str; 24] = [
    "sh",
    "cat",
    "cp",
    "dd",
    "dmesg",
    "echo",
    "free",
    "grep",
    "head",
    "httpd",
    "ip",
    "kill",
    "ls",
    "md5sum",
    "mkdir",
    "nc",
    "ping",
    "ps",
    "rm",
    "sha256sum",
    "sleep",
    "tail",
    "wc",
    "wget",
];
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Raised when this file makes another archive of the same parts.
const RECIPE: u32 = 1;

/// The agent is a workspace of its own: what it enables in its dependencies is for the guest only.
const AGENT_MANIFEST: &str = "lab/agent/Cargo.toml";

/// Builds the agent and the archives, unless they are of these sources. True if one was made now.
pub(crate) fn make(lab: &Path) -> Result<bool> {
    let kernel = paths::kernel(lab, Kernel::Debian12).context("target/lab/kernel has no kernel")?;
    let changed = make_for(lab, &kernel, &paths::initramfs(lab, Kernel::Debian12))?;
    match paths::kernel(lab, Kernel::Newest) {
        Some(kernel) => Ok(make_for(lab, &kernel, &paths::initramfs(lab, Kernel::Newest))? | changed),
        None => Ok(changed),
    }
}

fn make_for(lab: &Path, kernel: &Path, archive: &Path) -> Result<bool> {
    let stamp = fingerprint(kernel)?;
    let stamp_file = archive.with_extension("stamp");
    if archive.is_file() && std::fs::read_to_string(&stamp_file).is_ok_and(|known| known == stamp) {
        return Ok(false);
    }
    println!("setup: building the guest's agent and {}", archive.file_name().unwrap_or_default().display());
    let agent = build_agent(lab)?;
    let content = assemble(lab, kernel, &std::fs::read(&agent)?)?;
    // A guest that boots meanwhile reads the old archive or the new one, never half of one.
    let made = tempfile::NamedTempFile::new_in(lab)?;
    std::fs::write(made.path(), content)?;
    std::fs::set_permissions(made.path(), std::fs::Permissions::from_mode(0o644))?;
    made.persist(archive).with_context(|| format!("{} cannot be written", archive.display()))?;
    std::fs::write(&stamp_file, stamp)?;
    Ok(true)
}

fn build_agent(lab: &Path) -> Result<PathBuf> {
    let directory = lab.join("agent");
    let mut build =
        cargo(["build", "--quiet", "--release", "--manifest-path", AGENT_MANIFEST, "--target", TARGET]);
    build.arg("--target-dir").arg(&directory);
    // The guest has no libc of its own.
    build.env("RUSTFLAGS", "-C target-feature=+crt-static").env_remove("CARGO_ENCODED_RUSTFLAGS");
    run(&mut build).context("the guest's agent does not build")?;
    Ok(directory.join(TARGET).join("release/towline-lab-agent"))
}

fn assemble(lab: &Path, kernel: &Path, agent: &[u8]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in ["bin", "dev", "etc", "modules", "proc", "run", "sys", "tmp"] {
        archive.directory(directory);
    }
    archive.character_device("dev/console", DeviceNumber { major: 5, minor: 1 });
    archive.file("init", 0o755, agent);
    let busybox = lab.join("busybox/bin/busybox");
    let busybox = std::fs::read(&busybox).with_context(|| format!("{} cannot be read", busybox.display()))?;
    archive.file("bin/busybox", 0o755, &busybox);
    for applet in APPLETS {
        archive.link(&format!("bin/{applet}"), "busybox");
    }
    let release = kernel.file_name().unwrap_or_default().to_string_lossy().replace("vmlinuz-", "");
    let tree = kernel.ancestors().nth(2).context("a kernel lies in boot/ of its tree")?;
    let modules = modules::in_order(&tree.join("lib/modules").join(release), &MODULES)?;
    let mut order = String::new();
    for module in &modules {
        archive.file(&format!("modules/{}.ko", module.name), 0o644, &module.content);
        order.push_str(&format!("{}.ko\n", module.name));
    }
    archive.file("modules/order", 0o644, order.as_bytes());
    Ok(archive.finish())
}

/// Changes whenever the archive would: the agent's sources, the kernel, the lists above.
fn fingerprint(kernel: &Path) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let agent = root().join("lab/agent");
    let mut files = vec![agent.join("Cargo.toml"), agent.join("Cargo.lock")];
    for entry in std::fs::read_dir(agent.join("src"))? {
        files.push(entry?.path());
    }
    files.sort();
    for file in files {
        hasher.update(&std::fs::read(&file).with_context(|| file.display().to_string())?);
    }
    hasher.update(kernel.to_string_lossy().as_bytes());
    hasher.update(format!("{RECIPE} {MODULES:?} {APPLETS:?}").as_bytes());
    Ok(hasher.finalize().to_hex().to_string())
}
