"""The same choice by live trials: what is tried, what a trial showed, what is settled on."""
