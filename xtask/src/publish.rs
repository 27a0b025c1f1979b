//! Requirements of publishing crates: complete packages, light dependencies for device authors, and a
//! snapshot of each public API.

pub(crate) mod api;

use anyhow::{Context, Result, bail};

use crate::command::{cargo, output, packages, run, shown};

/// The crates that a device is made with, which compile neither a TLS library nor a WebSocket nor C.
const DEVICE_CRATES: [&str; 3] = ["towline-vhost-user", "towline-net", "towline-vsock"];
/// Packages that a device author does not expect to compile.
const HEAVY: [&str; 7] = ["aws-lc-rs", "aws-lc-sys", "cc", "cmake", "ring", "rustls", "tungstenite"];

/// Names of the workspace's packages without `publish = false`, all of them libraries. One without README or
/// example is an error.
fn published() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for package in packages()?.iter().filter(|package| package["publish"].is_null()) {
        let name = package["name"].as_str().context("a package without a name")?;
        let targets = package["targets"].as_array().into_iter().flatten();
        if !package["readme"].is_string() || !targets.into_iter().any(|target| target["kind"][0] == "example")
        {
            bail!("{name} has no README.md, or no program in examples/");
        }
        names.push(name.to_owned());
    }
    Ok(names)
}

/// Packs every published crate as `cargo publish` would. A manifest that lacks a version of a dependency, a
/// licence or a description is an error.
pub(crate) fn check_packages() -> Result<()> {
    let mut package = cargo(["package", "--no-verify", "--allow-dirty", "--color", "never"]);
    package.args(published()?.iter().flat_map(|name| ["--package", name]));
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
        let used = |heavy: &&str| tree.lines().any(|line| line.split_whitespace().next() == Some(*heavy));
        if let Some(heavy) = HEAVY.iter().find(|heavy| used(heavy)) {
            bail!("{name} depends on {heavy}; see `cargo tree --package {name} --invert {heavy}`");
        }
    }
    Ok(())
}

/// Checks that the program is built with the features of its transports: they are off by default, and a build
/// of the whole workspace would hide that they are missing.
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

/// Checks that each crate of the product compiles without warnings with none of its features, and with each of
/// them alone.
pub(crate) fn check_features() -> Result<()> {
    for package in packages()? {
        let is_product = package["manifest_path"].as_str().is_some_and(|path| path.contains("/crates/"));
        let Some((name, features)) = package["name"].as_str().zip(package["features"].as_object()) else {
            continue;
        };
        if !is_product || features.is_empty() {
            continue;
        }
        let each = features.keys().map(String::as_str).filter(|feature| *feature != "default");
        for feature in std::iter::once("").chain(each) {
            println!("features: {name} with {feature:?}");
            check_feature(name, feature)?;
        }
    }
    Ok(())
}

/// Checks that the program compiles without warnings when its default features are off, as a distributor may
/// build it: a build of the whole workspace always has them on.
pub(crate) fn check_minimal_program() -> Result<()> {
    check_feature("towline-cli", "")
}

/// Checks a package with this feature alone, or with none.
fn check_feature(package: &str, feature: &str) -> Result<()> {
    let mut clippy = cargo(["clippy", "--quiet", "--no-default-features", "--features", feature]);
    run(clippy.args(["--package", package, "--", "-D", "warnings"]))
}
