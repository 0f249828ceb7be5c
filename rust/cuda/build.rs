//! Compiles `csrc/*.cu` with nvcc and hands the images to the crate as aligned byte slices.
//!
//! `KVWEAVE_CUDA` chooses: `off` builds without kernels, `auto` (default) builds them when an nvcc
//! is found and warns otherwise, `require` makes a missing nvcc an error. No GPU is needed.
//! `KVWEAVE_CUDA_TARGETS` names other targets than the usual ones, as where only one GPU is meant.
//!
//! An image is compiled again only when the bytes it is made of change (source, the headers it
//! includes, flags, nvcc version); the stamp beside it remembers them, so touching a file costs
//! nothing.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Two targets of a source at once: the slowest takes minutes, while no other is left to compile.
const FLAGS: &[&str] = &["-fatbin", "-std=c++17", "-O3", "-Werror=all-warnings", "--threads=2"];
/// Native code for A100 and H100/H200, and PTX that newer drivers compile for anything later. A
/// source that needs one architecture names its own, in a line `// targets: sm_90a` at its head.
const TARGETS: &str = "sm_80, sm_90a, compute_80";

fn main() -> ExitCode {
    for name in ["KVWEAVE_CUDA", "KVWEAVE_CUDA_TARGETS", "NVCC", "PYO3_PYTHON", "CUDA_HOME", "PATH"]
    {
        println!("cargo::rerun-if-env-changed={name}");
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("cargo::error={why}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let root = workspace_root();
    let csrc = root.join("csrc");
    println!("cargo::rerun-if-changed={}", csrc.display());
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set by cargo")?);
    let choice = env::var("KVWEAVE_CUDA").unwrap_or_else(|_| "auto".into());
    if !["off", "auto", "require"].contains(&choice.as_str()) {
        return Err(format!("KVWEAVE_CUDA: expected off, auto or require, got {choice:?}"));
    }
    if choice == "off" {
        return write_module(&out, &[], 0, "built with KVWEAVE_CUDA=off");
    }
    let built = find_nvcc(&root).and_then(|nvcc| compile_all(&nvcc, &csrc, &out));
    match built {
        Ok((names, major)) => write_module(&out, &names, major, ""),
        Err(why) if choice == "require" => Err(why),
        Err(why) => {
            println!("cargo::warning=building without CUDA kernels: {why}");
            write_module(&out, &[], 0, &why)
        }
    }
}

fn workspace_root() -> PathBuf {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    manifest.ancestors().nth(2).map(Path::to_path_buf).unwrap_or(manifest)
}

/// Looks where an nvcc can be, the most deliberate choice first.
fn find_nvcc(root: &Path) -> Result<PathBuf, String> {
    if let Some(path) = env::var_os("NVCC") {
        let path = PathBuf::from(path);
        let got = path.display().to_string();
        return if path.is_file() { Ok(path) } else { Err(format!("NVCC is not a file: {got}")) };
    }
    let mut roots = toolchain_roots(&root.join(".toolchain"));
    roots.extend(interpreter_roots());
    roots.extend(env::var_os("CUDA_HOME").map(PathBuf::from));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|folder| folder.join("nvcc"));
    roots
        .iter()
        .map(|root| root.join("bin").join("nvcc"))
        .chain(on_path)
        .find(|nvcc| nvcc.is_file())
        .ok_or_else(|| {
            "no nvcc in NVCC, .toolchain, the build interpreter's nvidia packages, CUDA_HOME or \
             PATH (pip install 'nvidia-cuda-nvcc==13.0.*' and its companions in pyproject.toml)"
                .into()
        })
}

/// `nvidia/cu*` folders of an environment that holds only the toolchain packages.
fn toolchain_roots(environment: &Path) -> Vec<PathBuf> {
    children(&environment.join("lib"))
        .into_iter()
        .flat_map(|python| children(&python.join("site-packages").join("nvidia")))
        .collect()
}

/// `nvidia/cu*` folders of the interpreter that maturin builds for: in an isolated build these are
/// the packages named in `[build-system].requires`.
fn interpreter_roots() -> Vec<PathBuf> {
    let code = "import importlib.util as u; s = u.find_spec('nvidia'); \
                print('\\n'.join(s.submodule_search_locations) if s else '')";
    let Some(python) = env::var_os("PYO3_PYTHON") else { return Vec::new() };
    let Ok(output) = Command::new(python).args(["-c", code]).output() else { return Vec::new() };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().flat_map(|folder| children(Path::new(folder))).collect()
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Compiles every `.cu`, the longest first, as many at a time as there are cores; returns their
/// basenames, and which CUDA (13 of 13.0) they were compiled by.
fn compile_all(nvcc: &Path, csrc: &Path, out: &Path) -> Result<(Vec<String>, u32), String> {
    let version = Command::new(nvcc)
        .arg("--version")
        .output()
        .map_err(|error| format!("{} does not run: {error}", nvcc.display()))?;
    let is_source = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "cu");
    let mut sources: Vec<PathBuf> = children(csrc).into_iter().filter(is_source).collect();
    let length = |path: &PathBuf| fs::metadata(path).map_or(0, |file| file.len());
    sources.sort_by_key(|source| std::cmp::Reverse(length(source)));
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let (next, version) = (&AtomicUsize::new(0), &version.stdout);
    let work = || {
        let turn = || sources.get(next.fetch_add(1, Ordering::Relaxed));
        std::iter::from_fn(turn).map(|source| compile(nvcc, source, version, out)).collect()
    };
    let mut names = thread::scope(|scope| {
        let jobs: Vec<_> = (0..cores.min(sources.len())).map(|_| scope.spawn(work)).collect();
        let ended = jobs.into_iter().map(|job| {
            job.join().unwrap_or_else(|_| vec![Err("a compile thread panicked".to_string())])
        });
        ended.flatten().collect::<Result<Vec<String>, String>>()
    })?;
    names.sort();
    Ok((names, major_of(&String::from_utf8_lossy(version))?))
}

/// The 13 of "Cuda compilation tools, release 13.0, V13.0.88".
fn major_of(version: &str) -> Result<u32, String> {
    let number = version.split("release ").nth(1).and_then(|text| text.split('.').next());
    number
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| format!("nvcc --version: expected a release, got {version:?}"))
}

fn compile(nvcc: &Path, source: &Path, version: &[u8], out: &Path) -> Result<String, String> {
    let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let image = out.join(format!("{name}.fatbin"));
    let stamp = out.join(format!("{name}.stamp"));
    let usual = env::var("KVWEAVE_CUDA_TARGETS").unwrap_or_else(|_| TARGETS.into());
    let targets = targets_of(&String::from_utf8_lossy(&read(source)?), &usual);
    let mut content = version.to_vec();
    content.extend(
        FLAGS.iter().copied().chain(targets.iter().map(String::as_str)).flat_map(str::bytes),
    );
    for file in with_includes(source) {
        content.extend(read(&file)?);
    }
    let wanted = format!("{:016x}", fnv1a(&content));
    if image.is_file() && fs::read_to_string(&stamp).is_ok_and(|old| old == wanted) {
        return Ok(name);
    }
    let output = Command::new(nvcc)
        .args(FLAGS)
        .args(targets)
        .arg("-o")
        .arg(&image)
        .arg(source)
        .output()
        .map_err(|error| format!("{} does not run: {error}", nvcc.display()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).replace('\n', " | ");
        return Err(format!("nvcc rejected {name}.cu: {text}"));
    }
    fs::write(&stamp, wanted).map_err(|error| format!("{}: {error}", stamp.display()))?;
    Ok(name)
}

/// nvcc's flags for the targets that a source names, or for the usual ones.
fn targets_of(text: &str, usual: &str) -> Vec<String> {
    let named = text.lines().take(5).find_map(|line| line.strip_prefix("// targets: "));
    let targets = named.unwrap_or(usual).split(',').map(str::trim);
    let flag = |target: &str| {
        let number = target.trim_start_matches("sm_").trim_start_matches("compute_");
        format!("-gencode=arch=compute_{number},code={target}")
    };
    targets.map(flag).collect()
}

/// A source and every header of ours that it includes, directly or not.
fn with_includes(source: &Path) -> BTreeSet<PathBuf> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![source.to_path_buf()]);
    while let Some(file) = open.pop() {
        if !seen.insert(file.clone()) {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap_or_default();
        let included = |line: &str| {
            line.strip_prefix("#include \"")?
                .split('"')
                .next()
                .map(Path::new)
                .map(|name| file.with_file_name(name))
        };
        open.extend(text.lines().filter_map(included).filter(|path| path.is_file()));
    }
    seen
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// FNV-1a, 64 bits: enough to notice an edit, and no dependency.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Writes the module that `images.rs` includes: the images by basename.
fn write_module(out: &Path, names: &[String], major: u32, why_absent: &str) -> Result<(), String> {
    let mut text = format!("pub(crate) const WHY_ABSENT: &str = {why_absent:?};\n");
    text.push_str(&format!("pub(crate) const CUDA_MAJOR: i32 = {major};\n"));
    text.push_str("static ALL: &[(&str, &Image<[u8]>)] = &[\n");
    for name in names {
        let file = format!("concat!(env!(\"OUT_DIR\"), \"/{name}.fatbin\")");
        text.push_str(&format!("    ({name:?}, &Image(*include_bytes!({file}))),\n"));
    }
    text.push_str("];\n");
    let path = out.join("images.rs");
    fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
}
