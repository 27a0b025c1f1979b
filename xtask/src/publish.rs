//! Requirements of publishing the crates: complete packages, light dependencies for device authors, and a snapshot of each
//! public API.

pub(crate) mod api;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, metadata, output, run, shown};

/// The crates that a device is made with, which compile neither a TLS library nor a WebSocket nor C.
const DEVICE_CRATES: [&str; 3] = ["towline-vhost-user", "towline-net", "towline-vsock"];
/// Packages that a device author does not expect to compile.
const HEAVY: [&str; 7] = ["aws-lc-rs", "aws-lc-sys", "cc", "cmake", "ring", "rustls", "tungstenite"];

/// A package that is published.
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) has_library: bool,
    has_readme: bool,
    has_example: bool,
}

impl Package {
    /// The part of a published package that is not there.
    fn missing(&self) -> Option<&'static str> {
        if !self.has_readme {
            Some("README.md")
        } else if self.has_library && !self.has_example {
            Some("program in examples/")
        } else {
            None
        }
    }
}

/// The workspace's packages without `publish = false`.
pub(crate) fn packages() -> Result<Vec<Package>> {
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array().context("cargo metadata without packages")?;
    let published = packages.iter().filter(|package| package["publish"].is_null());
    let described = published.map(|package| {
        let name = package["name"].as_str().context("a package without a name")?.to_owned();
        let targets = package["targets"].as_array().context("a package without targets")?;
        let has_kind = |kind: &str| targets.iter().any(|target| target["kind"][0] == kind);
        let (has_library, has_example) = (has_kind("lib"), has_kind("example"));
        Ok(Package { name, has_library, has_readme: package["readme"].is_string(), has_example })
    });
    described.collect()
}

/// Packs every published crate as `cargo publish` would. A manifest that lacks a version of a dependency, a licence or a
/// description is an error, as is a crate without a README or a library without an example.
pub(crate) fn check_packages() -> Result<()> {
    let mut package = cargo(["package", "--no-verify", "--allow-dirty", "--color", "never"]);
    for published in packages()? {
        if let Some(missing) = published.missing() {
            bail!("{} has no {missing}", published.name);
        }
        package.args(["--package", &published.name]);
    }
    let packed = package.output().with_context(|| format!("{} cannot be started", shown(&package)))?;
    let text = String::from_utf8_lossy(&packed.stderr);
    if !packed.status.success() {
        bail!("{} failed with {}:\n{text}", shown(&package), packed.status);
    }
    if let Some(warning) = text.lines().find(|line| line.starts_with("warning: manifest has no")) {
        bail!("{warning}: add it to the crate's Cargo.toml; {} names the crate", shown(&package));
    }
    Ok(())
}

/// Checks what a device made with one of these crates alone compiles.
pub(crate) fn check_device_dependencies() -> Result<()> {
    for name in DEVICE_CRATES {
        let edges = ["tree", "--prefix", "none", "--format", "{p}", "--edges", "normal,build"];
        let tree = output(cargo(edges).args(["--package", name]))?;
        if let Some(heavy) = heavy_dependency(&tree) {
            bail!("{name} depends on {heavy}; see `cargo tree --package {name} --invert {heavy}`");
        }
    }
    Ok(())
}

/// Checks that the program is built with the features of its transports: they are off by default, and a build of the whole
/// workspace would hide that they are missing.
pub(crate) fn check_program_features() -> Result<()> {
    let edges = ["tree", "--prefix", "none", "--package", "towline-cli", "--edges", "features,normal"];
    let tree = output(&mut cargo(edges))?;
    for feature in ["tls", "websocket"] {
        let wanted = format!("towline-channel feature \"{feature}\"");
        if !tree.contains(&wanted) {
            bail!(
                "towline-cli is built without {wanted}: add it to the dependency in crates/control/Cargo.toml"
            );
        }
    }
    Ok(())
}

/// Checks that the program compiles without warnings when its default features are off, as a distributor may build it: a build
/// of the whole workspace always has them on.
pub(crate) fn check_minimal_program() -> Result<()> {
    let mut clippy = cargo(["clippy", "--quiet", "--package", "towline-cli", "--no-default-features"]);
    run(clippy.args(["--", "-D", "warnings"]))
}

/// The first of [`HEAVY`] in the output of `cargo tree`.
fn heavy_dependency(tree: &str) -> Option<&'static str> {
    let names = || tree.lines().filter_map(|line| line.split_whitespace().next());
    HEAVY.into_iter().find(|heavy| names().any(|name| name == *heavy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heavy_dependency_is_found_by_its_whole_name() {
        let tree = "towline-net v0.1.0 (/home/a)\nrustls-pki-types v1.0.0\nlibc v0.2.1\n";
        assert_eq!(heavy_dependency(tree), None);
        assert_eq!(heavy_dependency(&format!("{tree}rustls v0.23.1\n")), Some("rustls"));
    }

    #[test]
    fn a_library_needs_a_readme_and_an_example() {
        let package = |has_library, has_readme, has_example| {
            Package { name: "a".into(), has_library, has_readme, has_example }.missing()
        };
        assert_eq!(package(true, true, true), None);
        assert_eq!(package(false, true, false), None);
        assert_eq!(package(true, false, true), Some("README.md"));
        assert_eq!(package(true, true, false), Some("program in examples/"));
    }

    #[test]
    fn published_packages_are_the_crates_of_the_product() {
        let packages = packages().unwrap();
        let names: Vec<_> = packages.iter().map(|package| package.name.as_str()).collect();
        assert!(names.contains(&"towline-vhost-user") && names.contains(&"towline-protocol"), "{names:?}");
        assert!(!names.contains(&"towline-lab") && !names.contains(&"xtask"), "{names:?}");
    }
}
