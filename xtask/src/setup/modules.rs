//! Kernel modules of an unpacked kernel and what they need.
//!
//! The package has no modules.dep (its installation makes one), but every module names what it needs in its
//! `.modinfo` section: NUL-terminated `key=value` strings.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// A module, ready to be loaded.
pub(crate) struct Module {
    pub(crate) name: String,
    pub(crate) content: Vec<u8>,
}

/// `wanted` and all that they need, each after what it needs itself. Modules built into the kernel are left out.
pub(crate) fn in_order(modules: &Path, wanted: &[&str]) -> Result<Vec<Module>> {
    let mut files = BTreeMap::new();
    find(modules, &mut files)?;
    let built_in = std::fs::read_to_string(modules.join("modules.builtin")).unwrap_or_default();
    let built_in: Vec<String> = built_in.lines().map(|line| name(Path::new(line))).collect();
    let mut loaded = Vec::new();
    for module in wanted {
        add(module, &files, &built_in, &mut loaded)?;
    }
    Ok(loaded)
}

fn add(
    wanted: &str,
    files: &BTreeMap<String, PathBuf>,
    built_in: &[String],
    loaded: &mut Vec<Module>,
) -> Result<()> {
    if loaded.iter().any(|module| module.name == wanted) || built_in.iter().any(|module| module == wanted) {
        return Ok(());
    }
    let Some(file) = files.get(wanted) else {
        bail!("the kernel has no module {wanted}, neither as a file nor built in");
    };
    let content = read(file).with_context(|| format!("{} cannot be read", file.display()))?;
    for needed in needs(&content) {
        add(&needed, files, built_in, loaded)?;
    }
    loaded.push(Module { name: wanted.to_owned(), content });
    Ok(())
}

/// The modules that a module names in its `depends=`.
fn needs(content: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = content.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let value = content[at + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let value = String::from_utf8_lossy(value);
    value.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

fn find(directory: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            find(&path, files)?;
        } else if path.to_string_lossy().contains(".ko") {
            files.insert(name(&path), path);
        }
    }
    Ok(())
}

/// A module's name: its file's, without extensions and with underscores.
fn name(path: &Path) -> String {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    file.split(".ko").next().unwrap_or_default().replace('-', "_")
}

/// Later Debian kernels have their modules compressed.
fn read(file: &Path) -> Result<Vec<u8>> {
    if file.extension().is_none_or(|extension| extension != "xz") {
        return Ok(std::fs::read(file)?);
    }
    let output =
        Command::new("xz").arg("-dc").arg(file).output().context("xz (xz-utils) cannot be started")?;
    if !output.status.success() {
        bail!("xz -dc failed with {}", output.status);
    }
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_are_read_from_modinfo() {
        let content = b"\x7fELF..\0license=GPL\0depends=virtio,net-failover\0name=virtio_net\0";
        assert_eq!(needs(content), ["virtio", "net_failover"]);
        assert_eq!(needs(b"\0depends=\0name=virtio\0"), Vec::<String>::new());
        assert_eq!(needs(b"nothing"), Vec::<String>::new());
    }

    #[test]
    fn names_are_those_that_the_kernel_uses() {
        assert_eq!(name(Path::new("kernel/drivers/char/virtio-rng.ko.xz")), "virtio_rng");
        assert_eq!(name(Path::new("kernel/net/vsock.ko")), "vsock");
    }
}
