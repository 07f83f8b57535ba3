//! Promise: `diff` tells entries apart by what they do, and a sign is no difference.

mod checkpoint;
mod repository;
mod toy;

use std::fs;
use std::path::PathBuf;

use nalgebra::DMatrix;
use oscar_kv::calib::Moments;
use oscar_kv::calib::fit::{FitOptions, fit};
use oscar_kv::eval::diff::diff;
use oscar_kv::rotation::{bit_reversal, hadamard};
use oscar_kv::zoo::{Entry, Method, Rounding, VMoment};
use repository::oscar;
use serde_json::Value;
use toy::{Toy, str};

fn moments(toy: &Toy) -> PathBuf {
    let path = toy.at("moments.safetensors");
    let output = oscar(&toy.collect(&path));
    assert!(output.status.success(), "{output:?}");
    path
}

/// One transform a head, plain rounding, nothing searched.
fn paper() -> FitOptions {
    FitOptions {
        method: Method::Oscar,
        rounding: Rounding::Nearest,
        v_moment: Some(VMoment::Oo),
        k_clip: Some(0.96),
        v_clip: Some(0.92),
        ..FitOptions::default()
    }
}

/// The entry with the first and the third eigenvector of every basis turned around.
fn flipped(entry: &Entry) -> Entry {
    let mut out = entry.clone();
    for layer in out.layers.values_mut() {
        let d = layer.head_dim;
        let mix = bit_reversal::apply(&hadamard::matrix(d));
        let mut signs = DMatrix::<f64>::identity(d, d);
        (signs[(0, 0)], signs[(2, 2)]) = (-1.0, -1.0);
        for side in [&mut layer.k, &mut layer.v] {
            for encode in &mut side.encode {
                let old = DMatrix::from_row_slice(d, d, encode).map(f64::from);
                let new = old * mix.transpose() * &signs * &mix;
                *encode = new.transpose().iter().map(|x| *x as f32).collect();
            }
        }
    }
    out
}

#[test]
fn a_flipped_sign_is_no_difference() {
    let toy = Toy::new();
    let moments = Moments::open(&moments(&toy)).unwrap();
    let a = fit(&moments, &paper()).unwrap().entry;
    let b = flipped(&a);
    let found = diff(&a, &b, Some(&moments)).unwrap();
    assert!(
        !found.same_tensors && found.changes.is_empty(),
        "{:?}",
        found.changes
    );
    for head in &found.heads {
        assert!(!head.subspaces.is_empty());
        for subspace in &head.subspaces {
            assert!(
                subspace.angle_degrees < 0.1 && subspace.overlap > 0.9999,
                "{head:?}"
            );
        }
        // Values are not rotated by what an error in them costs, so there a sign may matter.
        let [x, y] = head.flatness.unwrap();
        assert!(head.side == "v" || (x - y).abs() < 1e-3, "{head:?}");
        // Other rounding errors of the same size.
        let [x, y] = head.predicted.unwrap();
        assert!(x > 0.0 && (y / x - 1.0).abs() < 0.25, "{head:?}");
    }
}

#[test]
fn what_differs_is_told_with_its_effect() {
    let toy = Toy::new();
    let moments = Moments::open(&moments(&toy)).unwrap();
    let a = fit(&moments, &paper()).unwrap().entry;
    let options = FitOptions {
        method: Method::Identity,
        v_moment: None,
        k_clip: Some(0.8),
        ..paper()
    };
    let b = fit(&moments, &options).unwrap().entry;
    let found = diff(&a, &b, Some(&moments)).unwrap();
    let changed: Vec<_> = found
        .changes
        .iter()
        .map(|change| change.what.as_str())
        .collect();
    assert!(
        changed.contains(&"method") && !changed.contains(&"model.id"),
        "{changed:?}"
    );
    for head in &found.heads {
        assert!(head.subspaces.is_empty(), "made without data");
        let [rotated, plain] = head.flatness.unwrap();
        if head.side == "k" {
            assert!(rotated > 0.98 && plain < 0.9, "{head:?}");
            assert!((head.clip[1] - 0.8).abs() < 1e-6);
        }
    }
    // The predicted error is that of the fit, where the side is alone.
    let refitted = fit(
        &moments,
        &FitOptions {
            rounding: Rounding::Feedback,
            ..FitOptions::default()
        },
    )
    .unwrap()
    .entry;
    let found = diff(&refitted, &refitted, Some(&moments)).unwrap();
    let report = refitted.metadata.fit.as_ref().unwrap();
    for head in &found.heads {
        let side = if head.side == "k" {
            &report.k
        } else {
            &report.v
        };
        let fitted = f64::from(side[&head.layer].output_error[head.kv_head]);
        let [predicted, _] = head.predicted.unwrap();
        assert!(
            (predicted / fitted - 1.0).abs() < 1e-3,
            "{head:?}: {fitted}"
        );
    }
}

#[test]
fn entries_of_other_shapes_are_refused_by_what_differs() {
    let toy = Toy::new();
    let moments = moments(&toy);
    let entry = toy.at("entry");
    assert!(
        oscar(&["fit", str(&moments), "--out", str(&entry)])
            .status
            .success()
    );
    let (_keep, other) = repository::copy();
    let output = oscar(&["diff", str(&entry), str(&other)]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        message.contains("different shape: 2 layers against 30"),
        "{message}"
    );
    let output = oscar(&["diff", str(&other), str(&other), "--moments", str(&moments)]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(
        message.contains("another shape than the entries'"),
        "{message}"
    );
}

#[test]
fn the_command_prints_text_and_json() {
    let toy = Toy::new();
    let moments = moments(&toy);
    let (a, b) = (toy.at("a"), toy.at("b"));
    assert!(
        oscar(&["fit", str(&moments), "--out", str(&a)])
            .status
            .success()
    );
    assert!(
        oscar(&["fit", str(&moments), "--k-clip", "0.9", "--out", str(&b)])
            .status
            .success()
    );
    let output = oscar(&["diff", str(&a), str(&b), "--moments", str(&moments)]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("angle at rank") && text.contains("largest growth of a predicted error"),
        "{text}"
    );
    let output = oscar(&["diff", str(&a), str(&b), "--format", "json"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["same_tensors"], false);
    assert_eq!(json["heads"][0]["predicted"], Value::Null);
    assert!((json["heads"][0]["clip"][1].as_f64().unwrap() - 0.9).abs() < 1e-6);

    fs::create_dir(toy.at("c")).unwrap();
    fs::copy(
        a.join("rotations.safetensors"),
        toy.at("c/rotations.safetensors"),
    )
    .unwrap();
    let output = oscar(&["diff", str(&a), str(&toy.at("c"))]);
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .contains("The tensors are the same.")
    );
}
