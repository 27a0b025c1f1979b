//! `cargo xtask deb`: builds a Debian package, installs it into an empty root and runs it there.
//!
//! ```text
//!   cargo build ─► a tree as it will stand on a host ─► dpkg-deb ─► dpkg --root into an empty root ─► run from there
//! ```
//! The program generates its manual pages and completions. Out of scope: an upload to Debian, which takes source packages
//! and debhelper.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::command::{cargo, metadata, output, root, run as run_command, target_directory};

/// Maintainer of a package that is not passed on. Others name theirs by Debian's variables, `DEBFULLNAME` and `DEBEMAIL`.
const MAINTAINER: [&str; 2] = ["The towline authors", "towline@localhost"];
/// Links to the program by whose name it is a vhost-user backend.
const BACKENDS: [&str; 2] = ["towline-net", "towline-vsock"];
/// Where shells look for completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/towline"),
    ("zsh", "usr/share/zsh/vendor-completions/_towline"),
    ("fish", "usr/share/fish/vendor_completions.d/towline.fish"),
];
/// Beside `docs`. They refer to each other.
const DOCUMENTS: [&str; 7] = [
    "README.md",
    "CHANGELOG.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE-APACHE",
    "LICENSE-MIT",
];

/// Builds the package, of the `debug` build if asked to, and installs and runs it below `target/`. Returns its path.
pub(crate) fn run(debug: bool) -> Result<PathBuf> {
    let (profile, directory) = if debug { ("dev", "debug") } else { ("release", "release") };
    run_command(&mut cargo(["build", "--package", "towline-cli", "--profile", profile]))?;
    let target = target_directory()?;
    let program = target.join(directory).join("towline");
    let work = target.join("deb");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| work.display().to_string())?;
    }
    let tree = work.join("tree");
    fill(&tree, &program)?;
    let version = version()?;
    let architecture = output(Command::new("dpkg").arg("--print-architecture"))?.trim().to_owned();
    let package = work.join(format!("towline_{version}_{architecture}.deb"));
    control(&tree, &version, &architecture)?;
    let mut build = Command::new("dpkg-deb");
    build.args(["--root-owner-group", "--build", "-Zxz"]).arg(&tree).arg(&package);
    output(&mut build)?;
    check(&package, &work.join("root"), &version)?;
    println!("deb: {}", package.display());
    Ok(package)
}

fn version() -> Result<String> {
    field("version")
}

fn homepage() -> Result<String> {
    field("repository")
}

/// A field of the program's manifest.
fn field(name: &str) -> Result<String> {
    let metadata = metadata()?;
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let cli = packages.find(|package| package["name"] == "towline-cli").context("no package towline-cli")?;
    Ok(cli[name].as_str().with_context(|| format!("towline-cli has no {name}"))?.to_owned())
}

/// The tree as it will stand on a host.
fn fill(tree: &Path, program: &Path) -> Result<()> {
    let root = root();
    let own = tree.join("usr/bin/towline");
    put(program, &own, 0o755)?;
    let mut strip = Command::new("strip");
    output(
        strip.args(["--strip-unneeded", "--remove-section=.comment", "--remove-section=.note"]).arg(&own),
    )?;
    for name in BACKENDS {
        let link = tree.join("usr/lib/towline").join(name);
        fs::create_dir_all(tree.join("usr/lib/towline"))?;
        symlink("../../bin/towline", &link).with_context(|| link.display().to_string())?;
    }
    put_all(&root.join("units"), &tree.join("usr/lib/systemd/system"))?;
    put_all(&root.join("packaging"), &tree.join("usr/share/qemu/vhost-user"))?;
    let pages = tree.join("usr/share/man/man1");
    output(Command::new(program).arg("man").arg(&pages))?;
    for page in files(&pages)? {
        output(Command::new("gzip").args(["-9n"]).arg(&page))?;
    }
    for (shell, place) in COMPLETIONS {
        let place = tree.join(place);
        let text = output(Command::new(program).args(["completions", shell]))?;
        fs::create_dir_all(place.parent().context("a place in a directory")?)?;
        fs::write(&place, text)?;
    }
    let documents = tree.join("usr/share/doc/towline");
    put_documents(&documents)?;
    fs::write(documents.join("copyright"), copyright()?)?;
    let changelog = documents.join("changelog");
    fs::write(&changelog, changelog_text()?)?;
    output(Command::new("gzip").args(["-9n"]).arg(&changelog))?;
    Ok(())
}

/// The documents, with the pictures, figures and schemas that they refer to.
fn put_documents(to: &Path) -> Result<()> {
    let root = root();
    let below_docs = below(&root.join("docs"))?;
    for path in DOCUMENTS.iter().map(|name| root.join(name)).chain(below_docs) {
        put(&path, &to.join(path.strip_prefix(&root)?), 0o644)?;
    }
    Ok(())
}

/// Changelog in Debian's format, which names the one for people.
fn changelog_text() -> Result<String> {
    // Of the last commit, so that the package of a commit is always the same.
    let date = output(Command::new("git").args(["log", "-1", "--format=%aD"]).current_dir(root()))?;
    Ok(format!(
        "towline ({}) unstable; urgency=medium\n\n  * Changes are in /usr/share/doc/towline/CHANGELOG.md.\n\n -- {}  {}\n",
        version()?,
        maintainer(),
        date.trim()
    ))
}

/// Returns true if the package's maintainer is named, by an address that receives mail.
pub(crate) fn has_maintainer() -> bool {
    std::env::var_os("DEBEMAIL").is_some()
}

fn maintainer() -> String {
    let [name, address] = MAINTAINER;
    let value = |key: &str, default: &str| std::env::var(key).unwrap_or_else(|_| default.to_owned());
    format!("{} <{}>", value("DEBFULLNAME", name), value("DEBEMAIL", address))
}

fn copyright() -> Result<String> {
    let mut log = Command::new("git");
    let year = output(log.args(["log", "-1", "--format=%ad", "--date=format:%Y"]).current_dir(root()))?;
    Ok(format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: towline\n\
         Source: {}\n\nFiles: *\nCopyright: {} the towline authors\nLicense: Apache-2.0 or Expat\n \
         Both are in this directory, as LICENSE-APACHE and LICENSE-MIT.\n",
        homepage()?,
        year.trim()
    ))
}

fn control(tree: &Path, version: &str, architecture: &str) -> Result<()> {
    let directory = tree.join("DEBIAN");
    fs::create_dir_all(&directory)?;
    let libc = libc_needed(&fs::read(tree.join("usr/bin/towline"))?)?;
    let size = output(Command::new("du").args(["-sk", "--apparent-size"]).arg(tree))?;
    let size = size.split_whitespace().next().unwrap_or("0");
    let text = format!(
        "Package: towline\nVersion: {version}\nArchitecture: {architecture}\nMaintainer: {}\n\
         Installed-Size: {size}\nDepends: libc6 (>= {libc}), libgcc-s1\nRecommends: qemu-system-x86\nSection: admin\nPriority: optional\n\
         Homepage: {}\nDescription: move, save and restore running QEMU guests\n \
         Copies a guest from one QEMU to another, into an image or an object store,\n \
         and back. Images have checksums, and restored guests can run while their\n \
         memory follows.\n .\n \
         Also a multiqueue network card, which migrates with its guest, and a vsock\n \
         device for guests (vhost-user).\n",
        maintainer(),
        homepage()?
    );
    fs::write(directory.join("control"), text)?;
    let mut sums = String::new();
    for path in below(tree)?.iter().filter(|path| !path.starts_with(&directory) && !path.is_symlink()) {
        let sum = output(Command::new("md5sum").arg(path))?;
        let sum = sum.split_whitespace().next().unwrap_or_default();
        sums.push_str(&format!("{sum}  {}\n", path.strip_prefix(tree)?.display()));
    }
    fs::write(directory.join("md5sums"), sums)?;
    Ok(())
}

/// The newest symbol version of glibc that the program requires.
fn libc_needed(program: &[u8]) -> Result<String> {
    const MARK: &[u8] = b"GLIBC_2.";
    let numbers =
        program.windows(MARK.len()).enumerate().filter(|(_, window)| *window == MARK).map(|(at, _)| {
            let digits = program[at + MARK.len()..].iter().take_while(|byte| byte.is_ascii_digit());
            digits
                .fold(0u32, |number, digit| number.saturating_mul(10).saturating_add(u32::from(digit - b'0')))
        });
    let newest = numbers.max().context("the program requires no glibc")?;
    Ok(format!("2.{newest}"))
}

/// Installs the package into an empty root and uses what is there.
fn check(package: &Path, root: &Path, version: &str) -> Result<()> {
    fs::create_dir_all(root.join("var/lib/dpkg/info"))?;
    fs::create_dir_all(root.join("var/lib/dpkg/updates"))?;
    fs::write(root.join("var/lib/dpkg/status"), "")?;
    let mut install = Command::new("dpkg");
    // Its libraries are this host's; the root has none.
    install.args([
        "--force-depends",
        "--force-not-root",
        "--force-bad-path",
        "--force-script-chrootless",
        "--log=/dev/null",
    ]);
    output(install.arg(format!("--root={}", root.display())).arg("--install").arg(package))?;
    let program = root.join("usr/bin/towline");
    let found = output(Command::new(&program).arg("--version"))?;
    ensure!(
        found.trim() == format!("towline {version}"),
        "--version prints {found:?}, expected towline {version}"
    );
    for descriptor in files(&root.join("usr/share/qemu/vhost-user"))? {
        let text = fs::read_to_string(&descriptor)?;
        let value: serde_json::Value =
            serde_json::from_str(&text).with_context(|| descriptor.display().to_string())?;
        let binary = value["binary"].as_str().and_then(|path| path.strip_prefix('/')).context("no binary")?;
        let reported = output(Command::new(root.join(binary)).args(["--fd", "3", "--print-capabilities"]))?;
        let reported: serde_json::Value = serde_json::from_str(&reported)?;
        ensure!(reported["type"] == value["type"], "{}: {reported} of {value}", descriptor.display());
    }
    for unit in files(&root.join("usr/lib/systemd/system"))? {
        let text = fs::read_to_string(&unit)?;
        for line in text.lines().filter_map(|line| line.strip_prefix("ExecStart=/")) {
            let path = line.split_whitespace().next().unwrap_or_default();
            ensure!(root.join(path).is_file(), "{}: /{path} is not in the package", unit.display());
        }
    }
    let installed =
        output(Command::new("dpkg").arg(format!("--root={}", root.display())).args(["--verify", "towline"]))?;
    ensure!(installed.is_empty(), "dpkg --verify: {installed}");
    let mut remove = Command::new("dpkg");
    remove
        .args(["--force-not-root", "--force-bad-path", "--log=/dev/null"])
        .arg(format!("--root={}", root.display()));
    output(remove.args(["--purge", "towline"]))?;
    if program.exists() {
        bail!("{} is still there after the package was removed", program.display());
    }
    Ok(())
}

fn put(from: &Path, to: &Path, mode: u32) -> Result<()> {
    fs::create_dir_all(to.parent().context("a place in a directory")?)?;
    fs::copy(from, to).with_context(|| format!("{} to {}", from.display(), to.display()))?;
    Ok(fs::set_permissions(to, fs::Permissions::from_mode(mode))?)
}

fn put_all(from: &Path, to: &Path) -> Result<()> {
    for file in files(from)? {
        put(&file, &to.join(file.file_name().context("a file's name")?), 0o644)?;
    }
    Ok(())
}

/// Entries of a directory, by name.
fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory).with_context(|| directory.display().to_string())?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// All files below it.
fn below(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for path in files(directory)? {
        if path.is_dir() && !path.is_symlink() { found.extend(below(&path)?) } else { found.push(path) }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_glibc_counts() {
        assert_eq!(libc_needed(b"..GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.9\0").unwrap(), "2.34");
        assert!(libc_needed(b"static").is_err());
    }

    #[test]
    fn units_and_descriptors_name_what_is_packed() {
        let units = files(&root().join("units")).unwrap();
        assert!(units.len() >= 6);
        for descriptor in files(&root().join("packaging")).unwrap() {
            let value: serde_json::Value =
                serde_json::from_str(&fs::read_to_string(&descriptor).unwrap()).unwrap();
            let binary = value["binary"].as_str().unwrap();
            assert!(BACKENDS.iter().any(|name| binary == format!("/usr/lib/towline/{name}")), "{binary}");
        }
    }

    /// Files that a page refers to; not what is elsewhere, or a directory of the sources.
    fn links(text: &str) -> impl Iterator<Item = &str> {
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        targets.filter(|target| {
            !target.is_empty() && !["://", "crates/", "fuzz/"].iter().any(|part| target.contains(part))
        })
    }

    #[test]
    fn documents_refer_to_what_is_packed() {
        let packed = tempfile::tempdir().unwrap();
        put_documents(packed.path()).unwrap();
        let (mut missing, mut count) = (Vec::new(), 0);
        let mut pages = below(packed.path()).unwrap();
        pages.retain(|page| page.extension().is_some_and(|kind| kind == "md"));
        for page in pages {
            for link in links(&fs::read_to_string(&page).unwrap()) {
                count += 1;
                if !page.parent().unwrap().join(link).exists() {
                    missing.push(format!("{}: {link}", page.strip_prefix(packed.path()).unwrap().display()));
                }
            }
        }
        assert!(count > 100, "{count}");
        assert!(missing.is_empty(), "{missing:#?}");
    }
}
